//! A stage: one part of the node that one kind of object needs, looked at and changed by four verbs.

use std::future::Future;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use shim::fault;
use state::{Kind, Object};

use crate::engine::Context;
use crate::error::{Error, Result};

/// How dangerous a step is to take without asking (the node-repair plan prints it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Risk {
    /// No data and no live process is touched.
    A,
    /// Something is replaced; the old one is kept or can be made again.
    B,
    /// Data or a live process would be lost: only for whom a person names it, or with `--force`.
    C,
    /// Nothing is done about it.
    R,
}

/// Why a step is due: the proof, in one word and one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    pub reason: &'static str,
    pub message: String,
    pub risk: Risk,
}

impl Why {
    pub fn new(reason: &'static str, message: impl Into<String>) -> Why {
        Why {
            reason,
            message: message.into(),
            risk: Risk::A,
        }
    }

    pub fn risky(reason: &'static str, message: impl Into<String>) -> Why {
        Why {
            risk: Risk::B,
            ..Why::new(reason, message)
        }
    }
}

/// The difference between a wish and what is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Keep,
    /// It is not there yet.
    Make(Why),
    /// It is there, but not as it should be.
    Change(Why),
    /// It was there and is gone or broken; making it again harms nobody.
    Remake(Why),
    /// Something else must happen first; its change triggers the next pass.
    Wait(Why),
    /// It cannot be had again: the object has ended.
    Lost(Why),
}

/// How an undo ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undone {
    Done,
    /// Under way; a trigger follows.
    Pending(String),
}

/// One part of the node for one kind of object. `observe` and `diff` change nothing; `act` and `undo` are idempotent
/// and may be cut anywhere.
pub trait Stage<K: Kind>: Send + Sync + 'static {
    /// The facts that `observe` finds.
    type Have: Send + Sync + 'static;
    /// Also the name of the condition.
    const NAME: &'static str;

    fn observe(cx: &Context, object: &Object<K>) -> impl Future<Output = Result<Self::Have>> + Send;
    /// Pure and total.
    fn diff(object: &Object<K>, have: &Self::Have) -> Step;
    /// Is there anything to undo?
    fn present(have: &Self::Have) -> bool;
    /// Copies facts into the status.
    fn report(have: &Self::Have, status: &mut K::Status) {
        let _ = (have, status);
    }
    fn act(cx: &Context, object: &Object<K>, step: &Step) -> impl Future<Output = Result<()>> + Send;
    fn undo(cx: &Context, object: &Object<K>) -> impl Future<Output = Result<Undone>> + Send;
}

/// Copies one look's facts into a status.
pub type Report<K> = Box<dyn FnOnce(&mut <K as Kind>::Status) + Send + Sync>;

/// What one look at a stage told.
pub struct Looked<K: Kind> {
    pub step: Step,
    pub present: bool,
    pub report: Report<K>,
}

/// A stage with its facts erased, so that a kind can list its stages.
#[async_trait]
pub trait AnyStage<K: Kind>: Send + Sync {
    fn name(&self) -> &'static str;
    async fn look(&self, cx: &Context, object: &Object<K>) -> Result<Looked<K>>;
    async fn act(&self, cx: &Context, object: &Object<K>, step: &Step) -> Result<()>;
    async fn undo(&self, cx: &Context, object: &Object<K>) -> Result<Undone>;
}

/// Makes an [`AnyStage`] of a [`Stage`].
pub struct Listed<S>(pub S);

#[async_trait]
impl<K: Kind, S: Stage<K>> AnyStage<K> for Listed<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }

    async fn look(&self, cx: &Context, object: &Object<K>) -> Result<Looked<K>> {
        let have = S::observe(cx, object).await?;
        let step = S::diff(object, &have);
        let present = S::present(&have);
        Ok(Looked {
            step,
            present,
            report: Box::new(move |status| S::report(&have, status)),
        })
    }

    async fn act(&self, cx: &Context, object: &Object<K>, step: &Step) -> Result<()> {
        point::<K>(S::NAME, "act.before").await?;
        S::act(cx, object, step).await?;
        point::<K>(S::NAME, "act.after").await
    }

    async fn undo(&self, cx: &Context, object: &Object<K>) -> Result<Undone> {
        point::<K>(S::NAME, "undo.before").await?;
        let undone = S::undo(cx, object).await?;
        point::<K>(S::NAME, "undo.after").await?;
        Ok(undone)
    }
}

/// A failpoint that holds up this task alone.
async fn point<K: Kind>(stage: &str, place: &str) -> Result<()> {
    if !fault::armed() {
        return Ok(());
    }
    let name = format!("stage.{}.{stage}.{place}", K::KIND);
    match fault::due(&name) {
        None => Ok(()),
        Some(fault::Action::Sleep(time)) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        Some(fault::Action::Hang) => {
            while fault::due(&name) == Some(fault::Action::Hang) {
                tokio::time::sleep(fault::LOOK).await;
            }
            Ok(())
        }
        Some(fault::Action::Error) => Err(Error::io("pass", &name)(fault::failure(&name))),
    }
}
