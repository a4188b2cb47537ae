//! As much of D-Bus as systemd's manager needs (D-Bus Specification, "Message Protocol"; org.freedesktop.systemd1(5)),
//! over the manager's own socket: root's, there without a bus daemon, no name to ask for first.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const SOCKET: &str = "/run/systemd/private";
/// How long systemd may take for a whole call with its job.
const PATIENCE: Duration = Duration::from_secs(30);
/// More than any answer to our calls has.
const MAX_MESSAGE: usize = 1 << 20;

const CALL: u8 = 1;
const RETURN: u8 = 2;
const ERROR: u8 = 3;
const SIGNAL: u8 = 4;

/// What systemd could not be asked, or refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("ask systemd ({SOCKET}) to {call} {unit}: {source}")]
    Io {
        call: &'static str,
        unit: String,
        source: io::Error,
    },
    #[error("systemd would not {call} {unit}: {name}: {message}")]
    Refused {
        call: &'static str,
        unit: String,
        name: String,
        message: String,
    },
    #[error("systemd's job to {call} {unit} ended as {result:?}; see `systemctl status {unit}`")]
    Job {
        call: &'static str,
        unit: String,
        result: String,
    },
}

impl Error {
    /// Is it systemd's error of this name (the part after `org.freedesktop.systemd1.`)?
    pub fn is(&self, wanted: &str) -> bool {
        matches!(self, Error::Refused { name, .. } if name.rsplit('.').next() == Some(wanted))
    }
}

/// A property's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Bool(bool),
    Number(u64),
    Text(String),
    Pids(Vec<u32>),
    Bits(Vec<u8>),
}

pub type Property = (&'static str, Value);

/// A message, or its body, in the making. Alignment counts from its begin.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }

    fn number(&mut self, number: u32) {
        self.align(4);
        self.0.extend(number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u32);
        self.0.extend(text.as_bytes());
        self.0.push(0);
    }

    fn signature(&mut self, signature: &str) {
        self.0.push(signature.len() as u8);
        self.0.extend(signature.as_bytes());
        self.0.push(0);
    }

    /// An array of elements aligned to `align`; its length counts neither itself nor the gap after it.
    fn array(&mut self, align: usize, fill: impl FnOnce(&mut Writer)) {
        self.number(0);
        let length = self.0.len() - 4;
        self.align(align);
        let begin = self.0.len();
        fill(self);
        let bytes = (self.0.len() - begin) as u32;
        self.0[length..length + 4].copy_from_slice(&bytes.to_le_bytes());
    }

    fn variant(&mut self, value: &Value) {
        match value {
            Value::Bool(yes) => {
                self.signature("b");
                self.number(u32::from(*yes));
            }
            Value::Number(number) => {
                self.signature("t");
                self.align(8);
                self.0.extend(number.to_le_bytes());
            }
            Value::Text(text) => {
                self.signature("s");
                self.text(text);
            }
            Value::Pids(pids) => {
                self.signature("au");
                self.array(4, |w| pids.iter().for_each(|pid| w.number(*pid)));
            }
            Value::Bits(bits) => {
                self.signature("ay");
                self.array(1, |w| w.0.extend(bits));
            }
        }
    }

    fn properties(&mut self, properties: &[Property]) {
        self.array(8, |w| {
            for (name, value) in properties {
                w.align(8);
                w.text(name);
                w.variant(value);
            }
        });
    }
}

/// A method call of the manager's, ready to be sent.
fn call(serial: u32, member: &str, signature: &str, body: &[u8]) -> Vec<u8> {
    let mut message = Writer(vec![b'l', CALL, 0, 1]);
    message.number(body.len() as u32);
    message.number(serial);
    message.array(8, |w| {
        let mut field = |code: u8, kind: &str, text: &str| {
            w.align(8);
            w.0.push(code);
            w.signature(kind);
            if kind == "g" { w.signature(text) } else { w.text(text) }
        };
        field(1, "o", "/org/freedesktop/systemd1");
        field(2, "s", "org.freedesktop.systemd1.Manager");
        field(3, "s", member);
        field(6, "s", "org.freedesktop.systemd1");
        field(8, "g", signature);
    });
    message.align(8);
    message.0.extend(body);
    message.0
}

/// What is of use in a message from systemd.
#[derive(Debug, Default, PartialEq, Eq)]
struct Message {
    kind: u8,
    reply_to: u32,
    member: String,
    error: String,
    /// The strings and object paths at its begin, up to four.
    texts: Vec<String>,
}

/// Takes values from a message; an end in the midst is an error.
struct Reader<'a>(&'a [u8], usize);

impl Reader<'_> {
    fn align(&mut self, to: usize) {
        self.1 = self.1.next_multiple_of(to);
    }

    fn bytes(&mut self, count: usize) -> io::Result<&[u8]> {
        let end = self.1.checked_add(count);
        let bytes = end.and_then(|end| self.0.get(self.1..end)).ok_or_else(garbled)?;
        self.1 += count;
        Ok(bytes)
    }

    fn number(&mut self) -> io::Result<u32> {
        self.align(4);
        let bytes = self.bytes(4)?.try_into().map_err(|_| garbled())?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn string(&mut self, length: usize) -> io::Result<String> {
        let text = String::from_utf8_lossy(self.bytes(length)?).into_owned();
        self.bytes(1)?;
        Ok(text)
    }

    fn text(&mut self) -> io::Result<String> {
        let length = self.number()? as usize;
        self.string(length)
    }

    fn signature(&mut self) -> io::Result<String> {
        let length = usize::from(self.bytes(1)?[0]);
        self.string(length)
    }
}

fn garbled() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its answer is garbled")
}

/// Reads a message of which the length fields were checked.
fn parse(message: &[u8]) -> io::Result<Message> {
    let mut all = Reader(message, 1);
    let mut found = Message {
        kind: all.bytes(1)?[0],
        ..Message::default()
    };
    all.1 = 12;
    let end = all.number()? as usize + 16;
    let mut body = String::new();
    while all.1 < end {
        all.align(8);
        let code = all.bytes(1)?[0];
        let kind = all.signature()?;
        match (code, kind.as_str()) {
            (3, "s") => found.member = all.text()?,
            (4, "s") => found.error = all.text()?,
            (5, "u") => found.reply_to = all.number()?,
            (8, "g") => body = all.signature()?,
            (_, "s" | "o") => drop(all.text()?),
            (_, "u") => drop(all.number()?),
            _ => return Err(garbled()),
        }
    }
    all.align(8);
    for kind in body.chars().take(4) {
        match kind {
            's' | 'o' => found.texts.push(all.text()?),
            'u' => drop(all.number()?),
            _ => break,
        }
    }
    Ok(found)
}

/// How long a message is, by its first 16 bytes.
fn length(head: &[u8; 16]) -> io::Result<usize> {
    let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
    let (body, fields) = (number(4), number(12));
    if head[0] != b'l' || body > MAX_MESSAGE || fields > MAX_MESSAGE {
        return Err(garbled());
    }
    Ok((16 + fields).next_multiple_of(8) + body)
}

/// A connection, for one call and its job.
struct Connection {
    stream: UnixStream,
    deadline: Instant,
}

impl Connection {
    fn open(socket: &str) -> io::Result<Connection> {
        let mut connection = Connection {
            stream: UnixStream::connect(socket)?,
            deadline: Instant::now() + PATIENCE,
        };
        // Who we are, the kernel tells; the text must only agree: our uid's digits in hexadecimal.
        let uid = nix::unistd::geteuid().to_string();
        let uid: String = uid.bytes().map(|digit| format!("{digit:02x}")).collect();
        // At once, and no call before the answer: what systemd reads together with BEGIN it leaves lying until more
        // comes, which is never.
        let hello = format!("\0AUTH EXTERNAL {uid}\r\nBEGIN\r\n");
        connection.stream.write_all(hello.as_bytes())?;
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") && line.len() < 256 {
            let mut byte = [0];
            connection.fill(&mut byte)?;
            line.push(byte[0]);
        }
        if !line.starts_with(b"OK ") {
            let told = String::from_utf8_lossy(&line).trim().to_owned();
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, told));
        }
        Ok(connection)
    }

    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in 30 s"));
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read_exact(buffer)
    }

    fn message(&mut self) -> io::Result<Message> {
        let mut head = [0; 16];
        self.fill(&mut head)?;
        let mut message = head.to_vec();
        message.resize(length(&head)?, 0);
        self.fill(&mut message[16..])?;
        parse(&message)
    }
}

/// Calls a method and, if it begins a job, waits for the job's end. Blocks.
fn ask(what: &'static str, unit: &str, method: (&str, &str), body: Writer, job: bool) -> Result<(), Error> {
    let told = |source| Error::Io {
        call: what,
        unit: unit.to_owned(),
        source,
    };
    let mut connection = Connection::open(SOCKET).map_err(told)?;
    let (member, signature) = method;
    connection
        .stream
        .write_all(&call(1, member, signature, &body.0))
        .map_err(told)?;
    let mut path = None;
    let mut ended: Vec<Message> = Vec::new();
    loop {
        let message = connection.message().map_err(told)?;
        match message.kind {
            ERROR if message.reply_to == 1 => {
                return Err(Error::Refused {
                    call: what,
                    unit: unit.to_owned(),
                    name: message.error,
                    message: message.texts.into_iter().next().unwrap_or_default(),
                });
            }
            RETURN if message.reply_to == 1 && !job => return Ok(()),
            RETURN if message.reply_to == 1 => path = message.texts.into_iter().next(),
            // Its job, unit and result; it may come before the answer.
            SIGNAL if message.member == "JobRemoved" => ended.push(message),
            _ => {}
        }
        let own = |message: &&Message| message.texts.first() == path.as_ref();
        let Some(end) = ended.iter().find(|message| path.is_some() && own(message)) else {
            continue;
        };
        return match end.texts.last().map(String::as_str) {
            Some("done") => Ok(()),
            result => Err(Error::Job {
                call: what,
                unit: unit.to_owned(),
                result: result.unwrap_or_default().to_owned(),
            }),
        };
    }
}

/// Makes a scope of the processes that its properties name; returns once it is.
pub fn start(unit: &str, properties: &[Property]) -> Result<(), Error> {
    let mut body = Writer::default();
    body.text(unit);
    body.text("replace");
    body.properties(properties);
    body.array(8, |_| {});
    ask("start", unit, ("StartTransientUnit", "ssa(sv)a(sa(sv))"), body, true)
}

/// Ends a unit and what is left in it; absent is success.
pub fn stop(unit: &str) -> Result<(), Error> {
    let mut body = Writer::default();
    body.text(unit);
    body.text("replace");
    absent(ask("stop", unit, ("StopUnit", "ss"), body, true))
}

/// Forgets that a unit failed; absent is success.
pub fn reset(unit: &str) -> Result<(), Error> {
    let mut body = Writer::default();
    body.text(unit);
    absent(ask("reset", unit, ("ResetFailedUnit", "s"), body, false))
}

/// Changes properties until the unit's end; systemd writes their files at once.
pub fn set(unit: &str, properties: &[Property]) -> Result<(), Error> {
    let mut body = Writer::default();
    body.text(unit);
    body.number(1);
    body.properties(properties);
    ask("set properties of", unit, ("SetUnitProperties", "sba(sv)"), body, false)
}

fn absent(done: Result<(), Error>) -> Result<(), Error> {
    match done {
        Err(e) if e.is("NoSuchUnit") => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// systemd, having read a call together with BEGIN, never answered it.
    #[test]
    fn nothing_is_sent_with_the_greeting() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("bus");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let client = std::thread::spawn(move || Connection::open(socket.to_str().unwrap()).map(drop));
        let (mut peer, _) = listener.accept().unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut greeting = vec![0; "\0AUTH EXTERNAL 30\r\nBEGIN\r\n".len()];
        peer.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting, b"\0AUTH EXTERNAL 30\r\nBEGIN\r\n");
        peer.set_nonblocking(true).unwrap();
        assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        peer.write_all(b"OK 0123\r\n").unwrap();
        client.join().unwrap().unwrap();
    }

    #[test]
    fn a_call_is_laid_out_as_the_specification_says() {
        let mut body = Writer::default();
        body.text("a.scope");
        body.properties(&[("MemoryMax", Value::Number(7)), ("Delegate", Value::Bool(true))]);
        // Text: length, 7 bytes, NUL; the array's length; then a struct at the next multiple of 8.
        assert_eq!(body.0[..4], 7u32.to_le_bytes());
        assert_eq!(&body.0[4..12], b"a.scope\0");
        let length = u32::from_le_bytes(body.0[12..16].try_into().unwrap()) as usize;
        assert_eq!(16 + length, body.0.len(), "the array ends with the body");
        assert_eq!(&body.0[20..30], b"MemoryMax\0");
        assert_eq!(&body.0[30..33], b"\x01t\0");
        assert_eq!(body.0[40..48], 7u64.to_le_bytes(), "aligned to 8");
        let message = call(9, "SetUnitProperties", "sa(sv)", &body.0);
        assert_eq!(message[..4], [b'l', CALL, 0, 1]);
        let head: &[u8; 16] = message[..16].try_into().unwrap();
        assert_eq!(super::length(head).unwrap(), message.len());
        let read = parse(&message).unwrap();
        assert_eq!((read.kind, read.member.as_str()), (CALL, "SetUnitProperties"));
        assert_eq!(read.texts, ["a.scope"]);
    }

    #[test]
    fn a_message_cut_anywhere_is_an_error_or_short_and_never_a_panic() {
        let mut body = Writer::default();
        body.number(3);
        ["/job/3", "a.scope", "done"].iter().for_each(|text| body.text(text));
        let message = call(2, "JobRemoved", "uoss", &body.0);
        assert_eq!(parse(&message).unwrap().texts, ["/job/3", "a.scope", "done"]);
        for end in 0..message.len() {
            assert!(parse(&message[..end]).is_err(), "{end}");
        }
        for at in 0..message.len() {
            let mut garbled = message.clone();
            garbled[at] ^= 0xff;
            let _ = parse(&garbled);
        }
        assert!(super::length(&[0xff; 16]).is_err());
    }
}
