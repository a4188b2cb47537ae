//! Channels over a WebSocket: the first byte of a message is its channel's number.
//!
//! In the base64 forms that byte is a digit, and text follows. In `v5.channel.k8s.io` a message 255, N ends channel N.

use std::io;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::{mpsc, watch};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Message, Utf8Bytes};

use super::channels::{Activity, Incoming, Link, Out, PIECE, QUEUE, Watcher};

/// Longest message taken, bytes.
const LIMIT: usize = 1 << 20;
/// Ends the channel whose number follows.
const CLOSE: u8 = 255;

/// What a subprotocol means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    pub name: &'static str,
    pub is_base64: bool,
    /// A status document on the error channel, and sizes of the terminal.
    pub is_v4: bool,
    /// The close signal.
    pub is_v5: bool,
}

const fn protocol(name: &'static str, is_base64: bool, is_v4: bool, is_v5: bool) -> Protocol {
    Protocol {
        name,
        is_base64,
        is_v4,
        is_v5,
    }
}

/// A client that names none gets the last.
pub const PROTOCOLS: [Protocol; 6] = [
    protocol("v5.channel.k8s.io", false, true, true),
    protocol("v4.channel.k8s.io", false, true, false),
    protocol("v4.base64.channel.k8s.io", true, true, false),
    protocol("channel.k8s.io", false, false, false),
    protocol("base64.channel.k8s.io", true, false, false),
    protocol("", false, false, false),
];

/// Subprotocols that carry a whole SPDY connection (port-forward).
pub const TUNNELS: [&str; 2] = ["SPDY/3.1+portforward.k8s.io", "v2.portforward.k8s.io"];

async fn server<T: AsyncRead + AsyncWrite + Unpin>(io: T) -> WebSocketStream<T> {
    let config = WebSocketConfig::default()
        .max_message_size(Some(LIMIT))
        .max_frame_size(Some(LIMIT));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// Serves a connection with these channels of the client's, by number.
pub async fn channels<T>(io: T, protocol: Protocol, numbers: &[u32]) -> (Link, Vec<Incoming>)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sink, mut stream) = server(io).await.split();
    let (out, mut queue) = mpsc::channel(QUEUE);
    let (alive, gone) = watch::channel(());
    let activity = Activity::new();
    let (mut senders, mut incoming) = (Vec::new(), Vec::new());
    for number in numbers {
        let (sender, receiver) = mpsc::channel::<Bytes>(QUEUE);
        senders.push((*number, sender));
        incoming.push(receiver);
    }
    let touched = activity.clone();
    let reader = tokio::spawn(async move {
        let _alive = alive;
        while let Some(Ok(message)) = stream.next().await {
            touched.touch();
            let (Message::Binary(_) | Message::Text(_)) = message else {
                continue;
            };
            let Some((channel, bytes)) = decode(protocol, message.into_data()) else {
                tracing::debug!("WebSocket message without a channel");
                return;
            };
            if protocol.is_v5 && channel == u32::from(CLOSE) {
                senders.retain(|(number, _)| bytes.first().map(|n| u32::from(*n)) != Some(*number));
                continue;
            }
            let Some((_, to)) = senders.iter().find(|(number, _)| *number == channel) else {
                continue;
            };
            let mut rest = bytes;
            while !rest.is_empty() {
                let piece = rest.split_to(rest.len().min(PIECE));
                // Nobody there: forget it.
                let _ = to.send(piece).await;
            }
        }
    });
    let touched = activity.clone();
    let writer = tokio::spawn(async move {
        while let Some(out) = queue.recv().await {
            let sent = match out {
                Out::Data(channel, bytes) => sink.send(encode(protocol, channel, &bytes)).await,
                Out::Close => {
                    let _ = sink.send(goodbye()).await;
                    return;
                }
                // Channels end with the connection.
                _ => Ok(()),
            };
            if let Err(error) = sent {
                tracing::debug!(%error, "WebSocket cannot be written");
                return;
            }
            touched.touch();
        }
    });
    let link = Link {
        out,
        watcher: Watcher { activity, gone },
        reader,
        writer,
    };
    (link, incoming)
}

/// An end as it should be; without the code clients take it for a failure.
fn goodbye() -> Message {
    Message::Close(Some(CloseFrame {
        code: CloseCode::Normal,
        reason: Utf8Bytes::from_static(""),
    }))
}

fn decode(protocol: Protocol, mut message: Bytes) -> Option<(u32, Bytes)> {
    if message.is_empty() {
        return None;
    }
    let first = message.split_to(1)[0];
    if !protocol.is_base64 {
        return Some((first.into(), message));
    }
    let digit = char::from(first).to_digit(10)?;
    Some((digit, BASE64.decode(&message).ok()?.into()))
}

fn encode(protocol: Protocol, channel: u32, bytes: &[u8]) -> Message {
    if protocol.is_base64 {
        return Message::text(format!("{channel}{}", BASE64.encode(bytes)));
    }
    let mut message = Vec::with_capacity(1 + bytes.len());
    message.push(channel as u8);
    message.extend(bytes);
    Message::binary(message)
}

/// A byte stream inside a WebSocket's binary messages.
pub async fn tunnel<T>(io: T) -> DuplexStream
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (near, far) = tokio::io::duplex(2 * PIECE);
    let (mut sink, mut stream) = server(io).await.split();
    tokio::spawn(async move {
        let (mut read, mut write) = tokio::io::split(far);
        let inward = async {
            while let Some(Ok(message)) = stream.next().await {
                if let Message::Binary(bytes) = message {
                    write.write_all(&bytes).await?;
                }
            }
            write.shutdown().await
        };
        let outward = async {
            let mut piece = vec![0; PIECE];
            loop {
                match read.read(&mut piece).await? {
                    0 => break,
                    len => {
                        let message = Message::binary(piece.get(..len).unwrap_or_default().to_vec());
                        sink.send(message).await.map_err(io::Error::other)?;
                    }
                }
            }
            sink.send(goodbye()).await.map_err(io::Error::other)
        };
        if let (Err(error), _) | (_, Err(error)) = tokio::join!(inward, outward) {
            tracing::debug!(%error, "tunnel ended");
        }
    });
    near
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_bear_their_channel() {
        let [v5, .., base64, _] = PROTOCOLS;
        assert_eq!(decode(v5, Bytes::from_static(b"\x02ab")), Some((2, "ab".into())));
        assert_eq!(decode(v5, Bytes::new()), None);
        assert_eq!(decode(base64, Bytes::from_static(b"1YWI=")), Some((1, "ab".into())));
        assert_eq!(decode(base64, Bytes::from_static(b"x")), None);
        assert_eq!(encode(base64, 1, b"ab"), Message::text("1YWI="));
        assert_eq!(encode(v5, 1, b"ab"), Message::binary(b"\x01ab".to_vec()));
    }
}
