//! What the two transports have in common: numbered channels in both directions over one connection.
//!
//! Everything that waits is bounded: a peer that does not read fills the connection's queue, and then whoever sends to
//! it waits; a channel whose reader is slow holds up the reading of its connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Longest piece that is passed on at once, bytes.
pub const PIECE: usize = 32 << 10;
/// Pieces that may wait for the peer on a connection.
pub const QUEUE: usize = 8;
/// How long a finished connection may take to pass on what is queued, and then to be closed by the peer.
const FINISH: Duration = Duration::from_secs(5);

/// What goes out on a connection, in this order.
#[derive(Debug)]
pub enum Out {
    Data(u32, Bytes),
    /// Nothing more comes on this channel.
    End(u32),
    /// Nothing more is wanted or comes on this channel.
    Reset(u32),
    /// Opens a channel (SPDY).
    Open(u32, Vec<(String, String)>),
    /// Accepts a channel that the peer opened (SPDY).
    Accept(u32),
    /// Echoes a ping (SPDY).
    Pong(u32),
    /// The last of all.
    Close,
}

/// The sending half of a channel.
#[derive(Clone, Debug)]
pub struct Outgoing {
    pub channel: u32,
    pub to: mpsc::Sender<Out>,
}

impl Outgoing {
    /// Queues bytes; waits while the queue is full. False once the connection is gone.
    pub async fn send(&self, bytes: Bytes) -> bool {
        self.to.send(Out::Data(self.channel, bytes)).await.is_ok()
    }

    pub async fn end(&self) {
        let _ = self.to.send(Out::End(self.channel)).await;
    }

    pub async fn reset(&self) {
        let _ = self.to.send(Out::Reset(self.channel)).await;
    }
}

/// The receiving half of a channel: pieces until its end.
pub type Incoming = mpsc::Receiver<Bytes>;

/// When something last went over a connection.
#[derive(Debug)]
pub struct Activity {
    start: Instant,
    /// ms after `start`.
    last: AtomicU64,
}

impl Activity {
    pub fn new() -> Arc<Activity> {
        Arc::new(Activity {
            start: Instant::now(),
            last: AtomicU64::new(0),
        })
    }

    pub fn touch(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.start + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }

    /// Ends once nothing happened for `limit`.
    pub async fn idle(&self, limit: Duration) {
        loop {
            let until = self.last() + limit;
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// What can be waited for on a connection.
#[derive(Clone, Debug)]
pub struct Watcher {
    pub activity: Arc<Activity>,
    /// Its sender goes when nothing can be received any more.
    pub gone: watch::Receiver<()>,
}

/// Ends when the daemon does.
pub async fn closed(mut closing: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is an end as well.
    let _ = closing.wait_for(|closing| *closing).await;
}

/// A connection's two tasks.
pub struct Link {
    pub out: mpsc::Sender<Out>,
    pub watcher: Watcher,
    pub reader: JoinHandle<()>,
    pub writer: JoinHandle<()>,
}

impl Watcher {
    /// Ends when the peer is gone.
    pub async fn gone(&self) {
        let mut gone = self.gone.clone();
        while gone.changed().await.is_ok() {}
    }
}

impl Link {
    /// Passes on what is queued, says goodbye and waits for the peer's; not for long.
    pub async fn finish(mut self) {
        let closed = async {
            let _ = self.out.send(Out::Close).await;
            let _ = (&mut self.writer).await;
        };
        // With bytes unread, closing would make the peer's system throw away what it has not read yet.
        if tokio::time::timeout(FINISH, closed).await.is_ok() {
            let _ = tokio::time::timeout(FINISH, &mut self.reader).await;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.reader.abort();
        self.writer.abort();
    }
}

/// The channels of one exec or attach.
pub struct Channels {
    pub stdin: Option<Incoming>,
    pub stdout: Option<Outgoing>,
    pub stderr: Option<Outgoing>,
    /// Sizes of the terminal, as JSON.
    pub resize: Option<Incoming>,
    pub error: Outgoing,
    pub form: Form,
}

/// How the outcome is told on the error channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Text, nothing on success (protocols before v4).
    Text,
    /// One `Status` document of Kubernetes' API.
    Json,
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Success,
    /// The program's exit code, or 128 and its signal; not 0.
    Exit(i32),
    Failure(String),
}

impl Outcome {
    /// What the error channel carries; `None` for nothing.
    pub fn told(&self, form: Form) -> Option<Bytes> {
        let message = match self {
            Outcome::Success => String::new(),
            Outcome::Exit(code) => format!("command terminated with non-zero exit code: exit status {code}"),
            Outcome::Failure(message) => message.clone(),
        };
        let text = match (form, self) {
            (Form::Text, Outcome::Success) => return None,
            (Form::Text, _) => message,
            (Form::Json, Outcome::Success) => json!({ "metadata": {}, "status": "Success" }).to_string(),
            (Form::Json, Outcome::Exit(code)) => json!({
                "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": message,
                "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
            })
            .to_string(),
            (Form::Json, Outcome::Failure(_)) => json!({
                "metadata": {}, "status": "Failure", "reason": "InternalError", "message": message, "code": 500,
            })
            .to_string(),
        };
        Some(text.into())
    }
}

impl Channels {
    /// Tells the outcome, then ends every channel.
    pub async fn close(&self, outcome: &Outcome) {
        if let Some(text) = outcome.told(self.form) {
            self.error.send(text).await;
        }
        for channel in [&self.stdout, &self.stderr].into_iter().flatten().chain([&self.error]) {
            channel.end().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_told_in_both_forms() {
        let told = |outcome: &Outcome, form| {
            outcome
                .told(form)
                .map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
        };
        assert_eq!(told(&Outcome::Success, Form::Text), None);
        assert!(
            told(&Outcome::Success, Form::Json)
                .unwrap()
                .contains(r#""status":"Success""#)
        );
        let exit: serde_json::Value = serde_json::from_str(&told(&Outcome::Exit(7), Form::Json).unwrap()).unwrap();
        assert_eq!(
            exit["details"]["causes"][0],
            json!({ "reason": "ExitCode", "message": "7" })
        );
        assert_eq!(told(&Outcome::Failure("no".into()), Form::Text).as_deref(), Some("no"));
    }

    #[tokio::test]
    async fn traffic_puts_the_idle_limit_off() {
        let activity = Activity::new();
        let begun = Instant::now();
        let busy = Duration::from_millis(1200);
        let touched = async {
            while begun.elapsed() < busy {
                activity.touch();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            std::future::pending::<()>().await;
        };
        let limit = Duration::from_secs(1);
        tokio::select! { () = activity.idle(limit) => {}, () = touched => {} }
        assert!(begun.elapsed() > busy);
    }
}
