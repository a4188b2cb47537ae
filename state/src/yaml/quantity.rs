//! Kubernetes quantities: `100m`, `1.5`, `1Gi`, `2e3`.

/// A quantity in thousandths, rounded up; it must not be negative.
pub(super) fn milli(text: &str) -> Result<i64, String> {
    let wrong = || format!("{text:?} is not a quantity such as 100m, 0.5, 2e3 or 1Gi");
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    if number.is_empty() || number == "." || number.len() > 40 {
        return Err(if text.starts_with('-') {
            format!("{text:?} must not be negative")
        } else {
            wrong()
        });
    }
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    // number = mantissa / 10^fraction digits
    let mantissa: u128 = format!("{whole}{fraction}").parse().map_err(|_| wrong())?;
    let (binary, decimal) = scale(suffix).ok_or_else(wrong)?;
    let too_large = || format!("{text:?} is too large");
    let exponent = decimal + 3 - i32::try_from(fraction.len()).map_err(|_| wrong())?;
    let scaled = mantissa.checked_mul(1 << binary).ok_or_else(too_large)?;
    let power = |n: i32| 10u128.checked_pow(n.unsigned_abs());
    let value = if exponent >= 0 {
        power(exponent)
            .and_then(|p| scaled.checked_mul(p))
            .filter(|_| scaled > 0)
            .or((scaled == 0).then_some(0))
    } else {
        Some(power(exponent).map_or(u128::from(scaled > 0), |p| scaled.div_ceil(p)))
    };
    value.and_then(|value| i64::try_from(value).ok()).ok_or_else(too_large)
}

/// Powers of two and of ten that a suffix stands for.
fn scale(suffix: &str) -> Option<(u32, i32)> {
    Some(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            (0, exponent.parse().ok().filter(|n: &i32| n.abs() <= 30)?)
        }
    })
}

/// A quantity in whole units, rounded up.
pub(super) fn whole(text: &str) -> Result<i64, String> {
    // 2^63 thousandths would bound memory at 9 PB, which is enough.
    milli(text).map(|milli| milli / 1000 + i64::from(milli % 1000 > 0))
}

#[cfg(test)]
mod tests {
    use super::{milli, whole};

    #[test]
    fn quantities_are_read_as_kubernetes_does() {
        for (text, wanted) in [
            ("0", 0),
            ("1", 1000),
            ("100m", 100),
            ("0.1", 100),
            ("1.5", 1500),
            (".5", 500),
            ("1e3", 1_000_000),
            ("1E3", 1_000_000),
            ("1e-2", 10),
            ("1u", 1),
            ("1k", 1_000_000),
            ("0.0001", 1),
            ("0E30", 0),
        ] {
            assert_eq!(milli(text), Ok(wanted), "{text}");
        }
        for (text, wanted) in [
            ("1Ki", 1024),
            ("1Gi", 1 << 30),
            ("1.5Mi", 3 << 19),
            ("1G", 1_000_000_000),
            ("500m", 1),
        ] {
            assert_eq!(whole(text), Ok(wanted), "{text}");
        }
        for text in [
            "",
            "-1",
            "1 Gi",
            "1gi",
            "Gi",
            ".",
            "1.2.3",
            "1e",
            "1e99",
            "9999999999E",
            "0x10",
            "١",
        ] {
            assert!(milli(text).is_err(), "{text}");
        }
    }
}
