//! Signals by name and number (signal(7); CRI `Signal`, OCI image `StopSignal`).

use state::container::ContainerSpec;
use state::image::ImageConfig;

use super::{Result, SpecError};

const NAMES: [(&str, i32); 33] = [
    ("HUP", libc::SIGHUP),
    ("INT", libc::SIGINT),
    ("QUIT", libc::SIGQUIT),
    ("ILL", libc::SIGILL),
    ("TRAP", libc::SIGTRAP),
    ("ABRT", libc::SIGABRT),
    ("BUS", libc::SIGBUS),
    ("FPE", libc::SIGFPE),
    ("KILL", libc::SIGKILL),
    ("USR1", libc::SIGUSR1),
    ("SEGV", libc::SIGSEGV),
    ("USR2", libc::SIGUSR2),
    ("PIPE", libc::SIGPIPE),
    ("ALRM", libc::SIGALRM),
    ("TERM", libc::SIGTERM),
    ("STKFLT", libc::SIGSTKFLT),
    ("CHLD", libc::SIGCHLD),
    ("CONT", libc::SIGCONT),
    ("STOP", libc::SIGSTOP),
    ("TSTP", libc::SIGTSTP),
    ("TTIN", libc::SIGTTIN),
    ("TTOU", libc::SIGTTOU),
    ("URG", libc::SIGURG),
    ("XCPU", libc::SIGXCPU),
    ("XFSZ", libc::SIGXFSZ),
    ("VTALRM", libc::SIGVTALRM),
    ("PROF", libc::SIGPROF),
    ("WINCH", libc::SIGWINCH),
    ("IO", libc::SIGIO),
    ("PWR", libc::SIGPWR),
    ("SYS", libc::SIGSYS),
    // Other names for the same; found by name only.
    ("POLL", libc::SIGIO),
    ("IOT", libc::SIGABRT),
];

/// First and last real-time signal as programs see them: the C library keeps 32 and 33 for itself.
const RT: (i32, i32) = (34, 64);

/// `SIGTERM`, `term`, `15`, `SIGRTMIN+3`, `RTMAX-1` and the CRI's `SIGRTMINPLUS3`, `SIGRTMAXMINUS1`.
pub fn number(name: &str) -> Option<i32> {
    let upper = name.trim().to_ascii_uppercase();
    if let Ok(n) = upper.parse::<i32>() {
        return (1..=RT.1).contains(&n).then_some(n);
    }
    let short = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some((_, n)) = NAMES.iter().find(|(name, _)| *name == short) {
        return Some(*n);
    }
    let offset = |rest: &str, signs: [&str; 2]| -> Option<i32> {
        if rest.is_empty() {
            return Some(0);
        }
        let digits = signs.iter().find_map(|sign| rest.strip_prefix(sign))?;
        digits
            .bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| digits.parse().ok())?
    };
    let n = if let Some(rest) = short.strip_prefix("RTMIN") {
        RT.0.checked_add(offset(rest, ["+", "PLUS"])?)?
    } else {
        RT.1.checked_sub(offset(short.strip_prefix("RTMAX")?, ["-", "MINUS"])?)?
    };
    (RT.0..=RT.1).contains(&n).then_some(n)
}

/// The name in the form `SIGTERM`, `SIGRTMIN+3`, `SIGRTMAX-1` (as C libraries spell them); a bare number otherwise.
pub fn name(number: i32) -> String {
    if let Some((name, _)) = NAMES.iter().find(|(_, n)| *n == number) {
        return format!("SIG{name}");
    }
    match number {
        n if n == RT.0 => "SIGRTMIN".into(),
        n if n == RT.1 => "SIGRTMAX".into(),
        n if (RT.0..=RT.0 + 15).contains(&n) => format!("SIGRTMIN+{}", n - RT.0),
        n if (RT.0..=RT.1).contains(&n) => format!("SIGRTMAX-{}", RT.1 - n),
        n => n.to_string(),
    }
}

/// The signal that asks a container to end: its own wish, else the image's, else SIGTERM.
///
/// # Errors
/// If the wish is no signal. An image's unknown signal is an error too, and says that it is the image's.
pub fn stop_signal(spec: &ContainerSpec, image: &ImageConfig) -> Result<i32> {
    let (field, wish) = match (spec.stop_signal.as_str(), image.stop_signal.as_str()) {
        ("", "") => return Ok(libc::SIGTERM),
        ("", image) => ("image configuration: StopSignal", image),
        (own, _) => ("spec.stopSignal", own),
    };
    number(wish).ok_or_else(|| {
        SpecError::invalid(
            field,
            format!("`{wish}` is not a signal, such as SIGTERM or SIGRTMIN+3"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_agree() {
        for n in (1..=31).chain(34..=64) {
            assert_eq!(number(&name(n)), Some(n), "{}", name(n));
        }
        for (text, want) in [
            ("TERM", 15),
            ("sigterm", 15),
            ("9", 9),
            ("SIGRTMIN", 34),
            ("SIGRTMIN+3", 37),
            ("RTMINPLUS15", 49),
            ("SIGRTMAXMINUS14", 50),
            ("SIGRTMAX-1", 63),
            ("SIGRTMAX", 64),
            ("SIGIOT", 6),
            ("SIGPOLL", 29),
        ] {
            assert_eq!(number(text), Some(want), "{text}");
        }
        for text in [
            "", "0", "65", "-1", "SIG", "FOO", "RTMIN+31", "RTMIN-1", "RTMIN+", "RTMIN++1", "RTMAX-31",
        ] {
            assert_eq!(number(text), None, "{text}");
        }
        assert_eq!(name(37), "SIGRTMIN+3");
        assert_eq!(name(63), "SIGRTMAX-1");
    }

    #[test]
    fn own_wish_then_image_then_term() {
        let mut spec = ContainerSpec::default();
        let mut image = ImageConfig::default();
        assert_eq!(stop_signal(&spec, &image).unwrap(), 15);
        image.stop_signal = "SIGQUIT".into();
        assert_eq!(stop_signal(&spec, &image).unwrap(), 3);
        spec.stop_signal = "SIGRTMINPLUS3".into();
        assert_eq!(stop_signal(&spec, &image).unwrap(), 37);
        spec.stop_signal = "SIGNAL".into();
        assert!(
            stop_signal(&spec, &image)
                .unwrap_err()
                .to_string()
                .starts_with("spec.stopSignal: `SIGNAL`")
        );
    }
}
