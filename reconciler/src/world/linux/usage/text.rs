//! The forms that cgroup files have: one number, keys and values, pressure.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::{Pressure, UNLIMITED};
use state::usage::Stall;

/// More than any file of the kernel's that is read here.
const MOST: u64 = 4 << 20;

/// A file's text; `None` if it cannot be read (the cgroup went, or the kernel has no such file).
pub fn read(path: &Path) -> Option<String> {
    let mut text = String::with_capacity(4096);
    File::open(path).ok()?.take(MOST).read_to_string(&mut text).ok()?;
    Some(text)
}

/// A file of one number; `max` is a limit beyond any.
pub fn number(path: &Path) -> Option<u64> {
    let text = read(path)?;
    match text.trim() {
        "max" => Some(u64::MAX),
        digits => digits.parse().ok(),
    }
}

/// A limit, if it is one.
pub fn limit(path: &Path) -> Option<u64> {
    number(path).filter(|limit| *limit < UNLIMITED)
}

/// Lines of a key and a number.
pub struct Keys(String);

impl Keys {
    pub fn read(path: &Path) -> Option<Keys> {
        read(path).map(Keys)
    }

    /// The number of `key`, 0 if there is none.
    pub fn get(&self, key: &str) -> u64 {
        let of = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok();
        self.0.lines().find_map(of).unwrap_or(0)
    }
}

/// A `*.pressure` file (Documentation/accounting/psi.rst): percents, and µs that become ns.
pub fn pressure(path: &Path) -> Option<Pressure> {
    let text = read(path)?;
    let stall = |kind: &str| -> Option<Stall> {
        let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
        let mut stall = Stall::default();
        for (key, value) in line.split_whitespace().filter_map(|word| word.split_once('=')) {
            match key {
                "avg10" => stall.avg10 = value.parse().ok()?,
                "avg60" => stall.avg60 = value.parse().ok()?,
                "avg300" => stall.avg300 = value.parse().ok()?,
                "total" => stall.total = value.parse::<u64>().ok()?.saturating_mul(1000),
                _ => {}
            }
        }
        Some(stall)
    };
    Some(Pressure {
        some: stall("some ")?,
        // Old kernels have no "full" for the processor.
        full: stall("full ").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_numbers_keys_and_pressure() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        assert_eq!(number(&file("n", "42\n")), Some(42));
        assert_eq!(number(&file("m", "max\n")), Some(u64::MAX));
        assert_eq!(limit(&file("m", "max\n")), None);
        assert_eq!(limit(&file("v1", "9223372036854771712\n")), None);
        assert_eq!(number(&dir.path().join("absent")), None);
        let keys = Keys::read(&file("k", "cache 1\nrss_huge 7\nrss 5\n")).unwrap();
        assert_eq!((keys.get("rss"), keys.get("rss_huge"), keys.get("swap")), (5, 7, 0));
        let text =
            "some avg10=1.50 avg60=0.02 avg300=0.13 total=1433137\nfull avg10=0.00 avg60=0.01 avg300=0.12 total=9\n";
        let psi = pressure(&file("p", text)).unwrap();
        assert_eq!(
            (psi.some.total, psi.some.avg10, psi.full.total),
            (1_433_137_000, 1.5, 9000)
        );
        assert_eq!(pressure(&file("bad", "some avg10=x total=1\n")), None);
    }
}
