//! Raw netfilter netlink: a socket, attributes, batches and dumps; what `nft` and `conntrack` share.
//!
//! The kernel answers these before `send` returns, so nothing here waits.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket, sockopt,
};

const HEADER: usize = 16;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 0x2;
const NLMSG_DONE: u16 = 0x3;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// `NFNL_SUBSYS_NFTABLES`, which batches are for.
const SUBSYS_NFTABLES: u16 = 10;

/// One list of attributes (`struct nlattr`), numbers big-endian as netfilter wants them.
#[derive(Default, Clone)]
pub struct Attrs(pub Vec<u8>);

impl Attrs {
    pub fn new() -> Attrs {
        Attrs::default()
    }

    pub fn raw(mut self, kind: u16, data: &[u8]) -> Attrs {
        self.0.extend(((data.len() + 4) as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(data);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub fn be32(self, kind: u16, value: u32) -> Attrs {
        self.raw(kind, &value.to_be_bytes())
    }

    /// A string with its final NUL.
    pub fn text(self, kind: u16, value: &str) -> Attrs {
        self.raw(kind, &[value.as_bytes(), &[0]].concat())
    }

    pub fn nest(self, kind: u16, value: Attrs) -> Attrs {
        self.raw(kind | 0x8000, &value.0)
    }
}

/// The attributes in a buffer; stops at the first that does not fit.
pub fn attrs(mut buffer: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u16::from_ne_bytes(buffer.get(..2)?.try_into().ok()?) as usize;
        let kind = u16::from_ne_bytes(buffer.get(2..4)?.try_into().ok()?) & 0x3fff;
        let data = buffer.get(4..length)?;
        buffer = buffer.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, data))
    })
}

/// The data of one attribute.
pub fn attr(buffer: &[u8], kind: u16) -> Option<&[u8]> {
    attrs(buffer).find(|(k, _)| *k == kind).map(|(_, data)| data)
}

/// One request.
pub struct Message {
    /// Subsystem << 8 | message.
    pub kind: u16,
    pub flags: u16,
    /// `NFPROTO_*` or an address family.
    pub family: u8,
    pub attrs: Attrs,
}

/// A socket of the calling thread's net namespace.
pub struct Socket(OwnedFd);

impl Socket {
    pub fn open() -> io::Result<Socket> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            flags,
            SockProtocol::NetlinkNetFilter,
        )?;
        // A rebuilt table with thousands of elements is one send; acknowledgements need not repeat their request.
        setsockopt(&fd, sockopt::SndBufForce, &(8 << 20))?;
        setsockopt(&fd, sockopt::RcvBufForce, &(8 << 20))?;
        set_cap_ack(&fd)?;
        Ok(Socket(fd))
    }

    /// Sends nftables messages as one transaction: all or nothing, and then the first error.
    pub fn batch(&self, messages: &[Message]) -> io::Result<()> {
        let mut out = Vec::new();
        let mark = |kind| Message {
            kind,
            flags: 0,
            family: 0,
            attrs: Attrs::new(),
        };
        put(&mut out, &mark(BATCH_BEGIN), 0, 0, SUBSYS_NFTABLES);
        for (n, message) in messages.iter().enumerate() {
            // Errors always come; one acknowledgement, of the last, proves the batch was run.
            let ack = if n + 1 == messages.len() { NLM_F_ACK } else { 0 };
            put(&mut out, message, ack, n as u32 + 1, 0);
        }
        put(
            &mut out,
            &mark(BATCH_END),
            0,
            messages.len() as u32 + 1,
            SUBSYS_NFTABLES,
        );
        send(self.0.as_raw_fd(), &out, MsgFlags::empty())?;
        let (mut acknowledged, mut refused) = (false, None);
        self.answers(|kind, body| {
            if kind == NLMSG_ERROR {
                match error_of(body) {
                    None => acknowledged = true,
                    Some(error) => refused = refused.take().or(Some(error)),
                }
            }
            false
        })?;
        match refused {
            Some(error) => Err(error),
            None if acknowledged || messages.is_empty() => Ok(()),
            None => Err(io::Error::other("the kernel did not acknowledge the batch")),
        }
    }

    /// Sends one request and takes its acknowledgement.
    pub fn request(&self, message: &Message) -> io::Result<()> {
        let mut out = Vec::new();
        put(&mut out, message, NLM_F_ACK, 1, 0);
        send(self.0.as_raw_fd(), &out, MsgFlags::empty())?;
        let mut result = Err(io::Error::other("the kernel did not acknowledge the request"));
        self.answers(|kind, body| {
            if kind == NLMSG_ERROR {
                result = error_of(body).map_or(Ok(()), Err);
            }
            false
        })?;
        result
    }

    /// Asks for a dump; `each` gets the attributes of every entry (without the 4-byte nfgenmsg) and its family.
    pub fn dump(&self, message: &Message, mut each: impl FnMut(u8, &[u8])) -> io::Result<()> {
        let mut out = Vec::new();
        put(&mut out, message, NLM_F_DUMP, 1, 0);
        send(self.0.as_raw_fd(), &out, MsgFlags::empty())?;
        let mut result = Ok(());
        self.answers(|kind, body| match kind {
            NLMSG_DONE => true,
            NLMSG_ERROR => {
                result = error_of(body).map_or(Ok(()), Err);
                true
            }
            _ => {
                if let (Some(&family), Some(attrs)) = (body.first(), body.get(4..)) {
                    each(family, attrs);
                }
                false
            }
        })?;
        result
    }

    /// Reads what there is, until `each` says it was the last.
    fn answers(&self, mut each: impl FnMut(u16, &[u8]) -> bool) -> io::Result<()> {
        let mut buffer = vec![0u8; 64 << 10];
        loop {
            let length = match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(length) => length,
                Err(nix::Error::EAGAIN) => return Ok(()),
                Err(nix::Error::EINTR) => continue,
                Err(e) => return Err(e.into()),
            };
            let mut rest = &buffer[..length];
            while let Some(size) = word(rest, 0)
                .map(|n| n as usize)
                .filter(|n| *n >= HEADER && *n <= rest.len())
            {
                let kind = u16::from_ne_bytes([rest[4], rest[5]]);
                if each(kind, &rest[HEADER..size]) {
                    return Ok(());
                }
                rest = rest.get(size.next_multiple_of(4)..).unwrap_or(&[]);
            }
        }
    }
}

fn put(out: &mut Vec<u8>, message: &Message, flags: u16, seq: u32, res_id: u16) {
    let length = (HEADER + 4 + message.attrs.0.len()) as u32;
    out.extend(length.to_ne_bytes());
    out.extend(message.kind.to_ne_bytes());
    out.extend((NLM_F_REQUEST | message.flags | flags).to_ne_bytes());
    out.extend(seq.to_ne_bytes());
    out.extend([0; 4]);
    // struct nfgenmsg: family, version 0, resource id.
    out.extend([message.family, 0]);
    out.extend(res_id.to_be_bytes());
    out.extend(&message.attrs.0);
}

fn word(buffer: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(buffer.get(at..at + 4)?.try_into().ok()?))
}

/// The error in an NLMSG_ERROR; `None` is an acknowledgement.
fn error_of(body: &[u8]) -> Option<io::Error> {
    match word(body, 0).unwrap_or(0) as i32 {
        0 => None,
        errno => Some(io::Error::from_raw_os_error(-errno)),
    }
}

fn set_cap_ack(fd: &OwnedFd) -> io::Result<()> {
    let one: libc::c_int = 1;
    // SAFETY: the descriptor is open and the option takes one int.
    let result = unsafe {
        let size = size_of::<libc::c_int>() as libc::socklen_t;
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_NETLINK,
            libc::NETLINK_CAP_ACK,
            (&raw const one).cast(),
            size,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_read_back() {
        let list = Attrs::new().text(1, "ab").be32(2, 7).nest(3, Attrs::new().raw(1, &[9]));
        assert_eq!(list.0.len(), 8 + 8 + 12);
        assert_eq!(attr(&list.0, 2), Some(&[0, 0, 0, 7][..]));
        assert_eq!(attr(attr(&list.0, 3).unwrap(), 1), Some(&[9][..]));
        assert_eq!(attrs(&list.0[..10]).count(), 1);
        assert_eq!(attrs(&[2, 0, 0, 0]).count(), 0);
    }
}
