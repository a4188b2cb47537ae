//! Names and values in front of a channel (SPDY/3 section 2.6.10), compressed with a dictionary of the protocol's own.
//! One zlib stream goes on over all blocks of a direction.

use std::io;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// Longest block taken, compressed or not, bytes.
pub const LIMIT: usize = 64 << 10;

/// The dictionary's words, each of which stands behind its length, and its tail.
const WORDS: &str = "\
    options|head|post|put|delete|trace|accept|accept-charset|accept-encoding|accept-language|accept-ranges|age|a\
    llow|authorization|cache-control|connection|content-base|content-encoding|content-language|content-length|co\
    ntent-location|content-md5|content-range|content-type|date|etag|expect|expires|from|host|if-match|if-modifie\
    d-since|if-none-match|if-range|if-unmodified-since|last-modified|location|max-forwards|pragma|proxy-authenti\
    cate|proxy-authorization|range|referer|retry-after|server|te|trailer|transfer-encoding|upgrade|user-agent|va\
    ry|via|warning|www-authenticate|method|get|status|200 OK|version|HTTP/1.1|url|public|set-cookie|keep-alive|o\
    rigin";
const TAIL: &str = "\
    100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritat\
    ive Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found5\
    00 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct N\
    ov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,applic\
    ation/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf\
    -8charset=iso-8859-1,utf-,*,enq=0.";

/// The dictionary: 1,423 bytes.
fn dictionary() -> Vec<u8> {
    let mut all = Vec::with_capacity(1423);
    for word in WORDS.split('|') {
        all.extend((word.len() as u32).to_be_bytes());
        all.extend(word.bytes());
    }
    all.extend(TAIL.bytes());
    all
}

/// Names and values, in order.
pub type Headers = Vec<(String, String)>;

fn broken(why: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("header block: {why}"))
}

/// Writes the blocks of one direction.
pub struct Writer(Compress);

impl Writer {
    pub fn new() -> io::Result<Writer> {
        let mut zlib = Compress::new(Compression::fast(), true);
        zlib.set_dictionary(&dictionary()).map_err(broken)?;
        Ok(Writer(zlib))
    }

    pub fn block(&mut self, headers: &Headers) -> io::Result<Vec<u8>> {
        let mut plain = (headers.len() as u32).to_be_bytes().to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            plain.extend((text.len() as u32).to_be_bytes());
            plain.extend(text.bytes());
        }
        let (mut out, before) = (Vec::with_capacity(plain.len() + 64), self.0.total_in());
        loop {
            let done = (self.0.total_in() - before) as usize;
            let rest = plain.get(done..).unwrap_or_default();
            self.0
                .compress_vec(rest, &mut out, FlushCompress::Sync)
                .map_err(broken)?;
            // All is out once there is room left behind it.
            if out.len() < out.capacity() {
                return Ok(out);
            }
            out.reserve(256);
        }
    }
}

/// Reads the blocks of one direction.
pub struct Reader(Decompress);

impl Default for Reader {
    fn default() -> Reader {
        Reader(Decompress::new(true))
    }
}

impl Reader {
    pub fn block(&mut self, compressed: &[u8]) -> io::Result<Headers> {
        let (mut plain, before) = (Vec::with_capacity(1024), self.0.total_in());
        loop {
            let done = (self.0.total_in() - before) as usize;
            let rest = compressed.get(done..).unwrap_or_default();
            match self.0.decompress_vec(rest, &mut plain, FlushDecompress::Sync) {
                Err(error) if error.needs_dictionary().is_some() => {
                    self.0.set_dictionary(&dictionary()).map_err(broken)?;
                    continue;
                }
                Err(error) => return Err(broken(error)),
                Ok(Status::StreamEnd) => return Err(broken("the stream ended")),
                Ok(_) => {}
            }
            if plain.len() < plain.capacity() {
                return parse(&plain);
            }
            if plain.len() >= LIMIT {
                return Err(broken(format!("more than {LIMIT} bytes")));
            }
            plain.reserve(plain.len());
        }
    }
}

fn parse(mut plain: &[u8]) -> io::Result<Headers> {
    fn number(from: &mut &[u8]) -> io::Result<usize> {
        let (head, rest) = from.split_first_chunk().ok_or_else(|| broken("cut short"))?;
        *from = rest;
        Ok(u32::from_be_bytes(*head) as usize)
    }
    fn text(from: &mut &[u8]) -> io::Result<String> {
        let len = number(from)?;
        let (text, rest) = from.split_at_checked(len).ok_or_else(|| broken("cut short"))?;
        *from = rest;
        String::from_utf8(text.to_vec()).map_err(broken)
    }
    let count = number(&mut plain)?;
    let mut headers = Headers::new();
    for _ in 0..count {
        headers.push((text(&mut plain)?, text(&mut plain)?));
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dictionary_is_the_protocols() {
        let all = dictionary();
        let (a, b) = all.iter().fold((1u32, 0u32), |(a, b), byte| {
            let a = (a + u32::from(*byte)) % 65_521;
            (a, (b + a) % 65_521)
        });
        assert_eq!((all.len(), b << 16 | a), (1423, 0xe3c6_a7c2));
    }

    #[test]
    fn blocks_read_back_one_after_the_other() {
        let (mut writer, mut reader) = (Writer::new().unwrap(), Reader::default());
        let long = vec![("streamtype".to_owned(), "x".repeat(5000))];
        for headers in [vec![("port".to_owned(), "80".to_owned())], vec![], long] {
            let block = writer.block(&headers).unwrap();
            assert_eq!(reader.block(&block).unwrap(), headers);
        }
    }

    #[test]
    fn hostile_blocks_are_refused() {
        assert!(Reader::default().block(b"no zlib").is_err());
        let mut writer = Writer::new().unwrap();
        let bomb = writer.block(&vec![("a".to_owned(), "0".repeat(1 << 20))]).unwrap();
        assert!(bomb.len() < LIMIT && Reader::default().block(&bomb).is_err());
        assert!(parse(&[0xff; 12]).is_err());
        assert!(parse(&[0, 0, 0, 1, 0, 0, 0, 9, b'a']).is_err());
    }
}
