//! The wire: ttrpc frames.
//!
//! ```text
//! | length u32 | stream u32 | type u8 | flags u8 | length bytes of prost message |      big-endian
//! ```

use crate::{Error, Result};

/// Bytes before the message.
pub const HEADER: usize = 10;
/// Largest message taken: an exec's output with its envelope.
pub const MAX: usize = 16 << 20;

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A `Request`, from the client.
    Request,
    /// A `Response`, ends the stream.
    Response,
    /// From the shim, in front of the response: the descriptors that come along are told in it.
    Data,
}

/// One frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the message.
    pub len: usize,
    /// Call it belongs to; chosen by the client, odd and rising.
    pub stream: u32,
    /// What it carries.
    pub kind: Kind,
}

impl Header {
    /// Reads a header. `Ok(None)`: not all there yet.
    ///
    /// # Errors
    /// A length above [`MAX`] or a type not known: the connection cannot go on.
    pub fn read(bytes: &[u8]) -> Result<Option<Header>> {
        let Some((head, _)) = bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let len = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if len > MAX {
            return Err(Error::Protocol(format!(
                "a message of {len} bytes, at most {MAX} are taken"
            )));
        }
        let kind = match head[8] {
            1 => Kind::Request,
            2 => Kind::Response,
            3 => Kind::Data,
            other => return Err(Error::Protocol(format!("frame type {other}"))),
        };
        Ok(Some(Header {
            len,
            stream: u32::from_be_bytes([head[4], head[5], head[6], head[7]]),
            kind,
        }))
    }

    fn bytes(self) -> [u8; HEADER] {
        let kind = match self.kind {
            Kind::Request => 1,
            Kind::Response => 2,
            Kind::Data => 3,
        };
        let [a, b, c, d] = (self.len as u32).to_be_bytes();
        let [e, f, g, h] = self.stream.to_be_bytes();
        [a, b, c, d, e, f, g, h, kind, 0]
    }
}

/// A whole frame around `message`.
pub fn encode(stream: u32, kind: Kind, message: &impl prost::Message) -> Vec<u8> {
    let len = message.encoded_len();
    let mut out = Vec::with_capacity(HEADER + len);
    out.extend(Header { len, stream, kind }.bytes());
    message.encode_raw(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api;

    #[test]
    fn a_frame_reads_back() {
        let message = api::Status {
            code: 5,
            message: "no".into(),
        };
        let frame = encode(7, Kind::Response, &message);
        assert_eq!(
            Header::read(&frame).unwrap(),
            Some(Header {
                len: frame.len() - HEADER,
                stream: 7,
                kind: Kind::Response
            })
        );
        assert_eq!(Header::read(&frame[..9]).unwrap(), None);
    }

    #[test]
    fn a_hostile_header_is_refused() {
        assert!(Header::read(&[0xff, 0, 0, 0, 0, 0, 0, 1, 1, 0]).is_err());
        assert!(Header::read(&[0, 0, 0, 0, 0, 0, 0, 1, 9, 0]).is_err());
    }
}
