//! Extended headers of a tar member, and how numbers are written in headers.

use super::super::content::Result;
use super::tar::{broken, printable};

/// Most pieces of one sparse file.
pub const SPARSE_LIMIT: usize = 1 << 16;

/// What extended headers say of the member that follows.
#[derive(Default)]
pub struct Extensions {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mtime: Option<(i64, u32)>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub sparse: Sparse,
}

#[derive(Default)]
pub struct Sparse {
    pub name: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub map: Vec<u64>,
    pub has_map: bool,
    pub major: Option<u64>,
}

impl Extensions {
    /// Takes in the records `length key=value` of one header.
    pub fn read(&mut self, bytes: &[u8]) -> Result<()> {
        let bad = || broken("pax header", "a record is malformed");
        let mut rest = bytes;
        let mut offset = None;
        while !rest.is_empty() {
            if rest.iter().all(|b| *b == 0) {
                break;
            }
            let space = rest.iter().take(20).position(|b| *b == b' ').ok_or_else(bad)?;
            let length = decimal(&rest[..space]).ok_or_else(bad)? as usize;
            if length < space + 2 || length > rest.len() || rest[length - 1] != b'\n' {
                return Err(bad());
            }
            let record = &rest[space + 1..length - 1];
            rest = &rest[length..];
            let equals = record.iter().position(|b| *b == b'=').ok_or_else(bad)?;
            self.record(&record[..equals], &record[equals + 1..], &mut offset)
                .ok_or_else(|| {
                    broken(
                        "pax header",
                        format!("the value of {} is malformed", printable(&record[..equals])),
                    )
                })?;
        }
        Ok(())
    }

    /// Takes in one pax record; `None` if its value is malformed. Unknown keys are ignored, as POSIX asks.
    fn record(&mut self, key: &[u8], value: &[u8], offset: &mut Option<u64>) -> Option<()> {
        let text = (!value.is_empty()).then(|| value.to_vec());
        let count = |value: &[u8]| {
            if value.is_empty() {
                Some(None)
            } else {
                decimal(value).map(Some)
            }
        };
        let id = |value: &[u8]| count(value)?.map(u32::try_from).transpose().ok();
        match key {
            b"path" => self.path = text,
            b"linkpath" => self.link = text,
            b"size" => self.size = count(value)?,
            b"uid" => self.uid = id(value)?,
            b"gid" => self.gid = id(value)?,
            b"mtime" if value.is_empty() => self.mtime = None,
            b"mtime" => self.mtime = Some(time(value)?),
            b"GNU.sparse.name" => self.sparse.name = text,
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = count(value)?,
            b"GNU.sparse.major" => self.sparse.major = count(value)?,
            b"GNU.sparse.offset" => *offset = count(value)?,
            b"GNU.sparse.numbytes" => self.sparse.push(offset.take()?, decimal(value)?)?,
            b"GNU.sparse.numblocks" => self.sparse.has_map = true,
            b"GNU.sparse.map" => {
                self.sparse.has_map = true;
                for pair in value.split(|b| *b == b',').collect::<Vec<_>>().chunks(2) {
                    match pair {
                        [offset, length] => self.sparse.push(decimal(offset)?, decimal(length)?)?,
                        [[]] => {}
                        _ => return None,
                    }
                }
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattrs.retain(|(have, _)| have != name);
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Some(())
    }
}

impl Sparse {
    fn push(&mut self, offset: u64, length: u64) -> Option<()> {
        self.map.extend([offset, length]);
        (self.map.len() <= 2 * SPARSE_LIMIT).then_some(())
    }
}

/// A numeric header field: octal text, or GNU's base 256, which may be negative.
pub fn number(field: &[u8]) -> Option<i64> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        let negative = first & 0x40 != 0;
        let start = if negative { -1i128 } else { 0 };
        let mut value = (start << 7) | i128::from(first & 0x7f);
        for byte in &field[1..] {
            value = value.checked_mul(256)? | i128::from(*byte);
        }
        return i64::try_from(value).ok();
    }
    let trimmed = field.split(|b| *b == 0).next().unwrap_or_default().trim_ascii();
    let mut value = 0i64;
    for byte in trimmed {
        let digit = byte.checked_sub(b'0').filter(|d| *d < 8)?;
        value = value.checked_mul(8)?.checked_add(i64::from(digit))?;
    }
    Some(value)
}

pub fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// `-?seconds[.fraction]`, rounded towards the past as file systems do.
fn time(value: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = if whole == "-" || whole.is_empty() {
        0
    } else {
        whole.parse().ok()?
    };
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let nanos: u32 = format!("{fraction:0<9.9}").parse().ok()?;
    match (text.starts_with('-'), nanos) {
        (true, 1..) => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos)),
        _ => Some((seconds, nanos)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   12 \0\0"), Some(0o12));
        assert_eq!(number(b"\0\0\0\0"), Some(0));
        assert_eq!(number(b"12x4"), None);
        assert_eq!(number(&[0x80, 0, 1, 0]), Some(256));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(
            number(&[0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            None
        );
    }

    #[test]
    fn times() {
        assert_eq!(time(b"12.5"), Some((12, 500_000_000)));
        assert_eq!(time(b"12.1234567899"), Some((12, 123_456_789)));
        assert_eq!(time(b"-1.25"), Some((-2, 750_000_000)));
        assert_eq!(time(b"-3"), Some((-3, 0)));
        assert_eq!(time(b"1.x"), None);
    }
}
