//! What people read: tables, ages, sizes. What comes from images and containers is shown without control characters.

use std::fmt;
use std::io::Write;

use anyhow::Result;

/// Rows of cells, printed in columns as wide as their widest cell.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<S: ToString>(header: impl IntoIterator<Item = S>) -> Table {
        let mut table = Table::default();
        table.row(header);
        table
    }

    pub fn row<S: ToString>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows
            .push(cells.into_iter().map(|cell| plain(&cell.to_string())).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column| {
            self.rows
                .iter()
                .filter_map(|r| r.get(column))
                .map(|c: &String| c.chars().count())
                .max()
        };
        let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}   "));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Writes to standard output; a reader that has left is an error as any other (see `main`).
pub fn out(text: impl fmt::Display) -> Result<()> {
    Ok(write!(std::io::stdout().lock(), "{text}")?)
}

/// The same, one line.
pub fn line(text: impl fmt::Display) -> Result<()> {
    Ok(writeln!(std::io::stdout().lock(), "{text}")?)
}

/// Without control characters, which could move the cursor or change a terminal's title.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Now, ns since the epoch.
pub fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// How long ago, in the two coarsest units that say something; `-` for never.
pub fn age(since: i64, now: i64) -> String {
    if since <= 0 {
        return "-".into();
    }
    let s = now.saturating_sub(since).max(0) / 1_000_000_000;
    match s {
        0..120 => format!("{s}s"),
        120..600 => match s % 60 {
            0 => format!("{}m", s / 60),
            rest => format!("{}m{rest}s", s / 60),
        },
        600..10_800 => format!("{}m", s / 60),
        10_800..172_800 => format!("{}h", s / 3600),
        _ => format!("{}d", s / 86_400),
    }
}

/// An instant (ns since the epoch) as RFC 3339, to the second; `-` for never.
pub fn time(ns: i64) -> String {
    match jiff::Timestamp::from_second(ns / 1_000_000_000) {
        Ok(time) if ns > 0 => time.to_string(),
        _ => "-".into(),
    }
}

/// Bytes in decimal units, as image sizes are told everywhere.
pub fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 999.5 {
            return if unit == "B" || value >= 99.5 {
                format!("{value:.0}{unit}")
            } else {
                format!("{value:.1}{unit}")
            };
        }
        value /= 1000.0;
    }
    format!("{value:.1}TB")
}

/// The beginning of an id, as long as other tools show it.
pub fn short(id: &str) -> &str {
    let id = id.strip_prefix("sha256:").unwrap_or(id);
    id.get(..13).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_nothing_trails() {
        let mut table = Table::new(["NAME", "STATUS"]);
        table.row(["web", "Running"]);
        table.row(["größer\x1b[31m", ""]);
        assert_eq!(
            table.to_string(),
            "NAME          STATUS\nweb           Running\ngrößer [31m\n"
        );
    }

    #[test]
    fn ages() {
        let s = 1_000_000_000;
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (3600, "60m"),
            (10_800, "3h"),
            (172_799, "47h"),
            (400_000, "4d"),
        ] {
            assert_eq!(age(5 * s, (5 + seconds) * s), text);
        }
        assert_eq!(age(0, 5), "-");
        assert_eq!(age(9 * s, s), "0s", "a clock that was set back");
    }

    #[test]
    fn sizes_and_times() {
        for (bytes, text) in [
            (0, "0B"),
            (999, "999B"),
            (1000, "1.0kB"),
            (1_234_567, "1.2MB"),
            (123_456_789, "123MB"),
        ] {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(time(1_700_000_000_123_456_789), "2023-11-14T22:13:20Z");
        assert_eq!(time(0), "-");
        assert_eq!(short("sha256:0123456789abcdef"), "0123456789abc");
        assert_eq!(short("0123"), "0123");
    }
}
