//! Grant: leave to open one stream (CRI Exec, Attach, PortForward), in memory only. Its uid is the token in the URL.
//!
//! Written by the call, redeemed once by the streaming server, erased when the stream ends.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::check;
use crate::clock::boottime_ns;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};
use crate::store::Store;

pub type Grant = Object<GrantKind>;

/// How long a grant may wait for its client.
pub const VALID: Duration = Duration::from_secs(60);
/// Most grants that wait at once.
pub const WAITING: usize = 1000;

#[derive(Clone, Debug)]
pub struct GrantKind;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GrantSpec {
    pub wish: Wish,
    /// CLOCK_BOOTTIME ns after which it is void.
    pub until: u64,
    /// A client came; set once.
    #[serde(default)]
    pub redeemed: bool,
}

/// What may be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Wish {
    /// A program in a running container.
    Exec {
        container: String,
        command: Vec<String>,
        streams: Streams,
    },
    /// The streams of a running container's first process.
    Attach { container: String, streams: Streams },
    /// Connections to ports inside a pod.
    PortForward { sandbox: String, ports: Vec<u16> },
}

/// Which streams the client opens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Streams {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    /// One terminal instead of three pipes.
    pub tty: bool,
}

impl Wish {
    /// The first part of the URL's path.
    pub fn verb(&self) -> &'static str {
        match self {
            Wish::Exec { .. } => "exec",
            Wish::Attach { .. } => "attach",
            Wish::PortForward { .. } => "portforward",
        }
    }
}

impl GrantSpec {
    /// A grant for `wish` from now on.
    pub fn new(wish: Wish) -> GrantSpec {
        GrantSpec {
            wish,
            until: boottime_ns() + VALID.as_nanos() as u64,
            redeemed: false,
        }
    }

    /// Can a client still come?
    pub fn waits(&self) -> bool {
        !self.redeemed && self.until > boottime_ns()
    }
}

/// Erases what nobody came for, and says how many grants still wait.
pub async fn waiting(store: &Store) -> Result<usize> {
    let mut waiting = 0;
    for grant in store.list::<GrantKind>() {
        if grant.spec.waits() {
            waiting += 1;
        } else if !grant.spec.redeemed {
            store.erase::<GrantKind>(grant.uid()).await?;
        }
    }
    Ok(waiting)
}

/// Takes a grant, once.
///
/// # Errors
/// [`Error::NotFound`]: it is not there, was taken, or its time is over.
pub async fn redeem(store: &Store, token: &str) -> Result<()> {
    let missing = || Error::NotFound {
        kind: GrantKind::KIND,
        name: "of this token".to_owned(),
    };
    let take = move |_: &mut Meta, spec: &mut GrantSpec| {
        if !spec.waits() {
            return Err(missing());
        }
        spec.redeemed = true;
        Ok(())
    };
    store.update::<GrantKind, _>(token, take).await.map(drop)
}

impl Kind for GrantKind {
    const KIND: &'static str = "Grant";
    const PLURAL: &'static str = "grants";
    const VOLATILE: bool = true;
    type Spec = GrantSpec;
    type Status = ();

    fn validate(_: &Meta, spec: &GrantSpec) -> Result<()> {
        let (streams, object) = match &spec.wish {
            Wish::Exec {
                container,
                command,
                streams,
            } => {
                if command.is_empty() {
                    return Err(Error::invalid("spec.wish.command", "must not be empty"));
                }
                check::arguments("spec.wish.command", command)?;
                (Some(streams), container)
            }
            Wish::Attach { container, streams } => (Some(streams), container),
            Wish::PortForward { sandbox, .. } => (None, sandbox),
        };
        check::text("spec.wish", object)?;
        match streams {
            Some(streams) if !(streams.stdin || streams.stdout || streams.stderr) => {
                Err(Error::invalid("stdin", "one of stdin, stdout and stderr must be set"))
            }
            Some(streams) if streams.tty && streams.stderr => {
                Err(Error::invalid("stderr", "a tty has one output stream, which is stdout"))
            }
            _ => Ok(()),
        }
    }
}
