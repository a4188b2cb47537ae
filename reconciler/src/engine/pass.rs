//! One pass over one object: undo from the top down to its height, then build up to it.

use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use state::{Condition, Kind, Object, Truth};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::engine::plan::{Action, Planned};
use crate::engine::stage::{AnyStage, Looked, Report, Step, Undone, Why};
use crate::engine::{Context, conditions};
use crate::error::{Class, Error, Result};

/// A kind that stands on stages.
#[async_trait]
pub trait Staged: Kind {
    /// What is read once, before any stage, to know the height: run records, receipts, the boot.
    type Facts: Send + Sync;

    /// Rungs from bottom to top; the stages of one rung run at once.
    fn rungs() -> &'static [&'static [&'static dyn AnyStage<Self>]];
    async fn facts(cx: &Context, object: &Object<Self>) -> Result<Self::Facts>;
    fn height(cx: &Context, object: &Object<Self>, facts: &Self::Facts) -> Height;
    /// Writes down, once, that the object has ended in a way that no stage can mend.
    async fn ended(cx: &Context, object: &Object<Self>, why: &Why) -> Result<()>;
    /// Completes the status: phase, generation, conditions.
    fn settle(object: &Object<Self>, facts: &Self::Facts, summary: Summary, status: &mut Self::Status);
    fn conditions(status: &Self::Status) -> &[Condition];
    fn conditions_mut(status: &mut Self::Status) -> &mut Vec<Condition>;
}

/// How many rungs an object keeps.
#[derive(Debug, PartialEq, Eq)]
pub struct Height {
    pub keep: usize,
    /// Why nothing may be undone yet.
    pub hold: Option<String>,
    /// The end to be written down before anything else.
    pub ended: Option<Why>,
}

impl Height {
    pub fn keep(keep: usize) -> Height {
        Height {
            keep,
            hold: None,
            ended: None,
        }
    }
}

/// What a pass found, for [`Staged::settle`].
pub struct Summary {
    pub conditions: Vec<Condition>,
    /// Every rung up to the height is done and nothing is left above it.
    pub settled: bool,
    /// Nothing is left above the height.
    pub lowered: bool,
}

/// Whether a pass may change the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Act,
    /// Looks only; the steps it would take go into the plan.
    Plan,
}

/// A finished pass.
pub struct Passed<K: Kind> {
    pub status: K::Status,
    pub settled: bool,
    pub lowered: bool,
    /// The first failure, if any.
    pub error: Option<Error>,
    pub plan: Vec<Planned>,
    /// Steps and undos really taken.
    pub acted: usize,
}

struct Walk<'a, K: Kind> {
    cx: &'a Context,
    object: &'a Object<K>,
    mode: Mode,
    conditions: Vec<Condition>,
    reports: Vec<Report<K>>,
    error: Option<Error>,
    plan: Vec<Planned>,
    acted: usize,
    lost: Option<Why>,
}

/// How one stage came out of its turn.
struct Turn<K: Kind> {
    name: &'static str,
    outcome: Result<Outcome>,
    looked: Option<Looked<K>>,
    planned: Option<Planned>,
    acted: bool,
}

enum Outcome {
    Done,
    Wait(Why),
    Lost(Why),
}

/// The longest that one verb of one stage may take before its pass gives up on it (it goes on in the background only
/// where the kernel holds it). Stops with a grace period wait for triggers instead.
const BOUND: Duration = Duration::from_secs(120);

/// A verb that takes longer is told of in the object's conditions while it runs, for whoever waits or asks.
const LONG: Duration = Duration::from_millis(500);

/// Writes an object's end down, if what is there says that it has one; nothing else is done.
pub async fn end<K: Staged>(cx: &Context, object: &Object<K>) -> Result<()> {
    let facts = K::facts(cx, object).await?;
    match K::height(cx, object, &facts).ended {
        Some(why) => K::ended(cx, object, &why).await,
        None => Ok(()),
    }
}

/// Runs one pass.
pub async fn run<K: Staged>(cx: &Context, object: &Object<K>, mode: Mode) -> Result<Passed<K>> {
    let mut facts = K::facts(cx, object).await?;
    let mut height = K::height(cx, object, &facts);
    if let (Some(why), Mode::Act) = (&height.ended, mode) {
        K::ended(cx, object, why).await?;
        facts = K::facts(cx, object).await?;
        height = K::height(cx, object, &facts);
    }
    let mut walk = Walk {
        cx,
        object,
        mode,
        conditions: Vec::new(),
        reports: Vec::new(),
        error: None,
        plan: Vec::new(),
        acted: 0,
        lost: None,
    };
    let rungs = K::rungs();
    let keep = height.keep.min(rungs.len());
    let lowered = walk.down(&rungs[keep..], height.hold.as_deref()).await;
    // A pass that only plans goes on as if what it planned were done.
    let built = (lowered || mode == Mode::Plan) && walk.up(&rungs[..keep]).await;
    if let (Some(why), Mode::Act) = (walk.lost.take(), mode) {
        K::ended(cx, object, &why).await?;
        walk.error = Some(Error::Pending(why.message));
    }
    let settled = lowered && built;
    if walk.acted > 0 {
        // What was done changed what the status is computed from.
        facts = K::facts(cx, object).await?;
    }
    let mut status = K::Status::default();
    for report in walk.reports {
        report(&mut status);
    }
    conditions::keep_since(
        &mut walk.conditions,
        K::conditions(&object.status),
        cx.world.clock.now_ns(),
    );
    let summary = Summary {
        conditions: walk.conditions,
        settled,
        lowered,
    };
    K::settle(object, &facts, summary, &mut status);
    Ok(Passed {
        status,
        settled,
        lowered,
        error: walk.error,
        plan: walk.plan,
        acted: walk.acted,
    })
}

impl<K: Staged> Walk<'_, K> {
    async fn down(&mut self, above: &[&[&'static dyn AnyStage<K>]], hold: Option<&str>) -> bool {
        let mut all = true;
        for rung in above.iter().rev() {
            let turns = join_all(rung.iter().map(|stage| self.lower(*stage, hold))).await;
            let mut clear = true;
            for turn in turns {
                clear &= self.note(turn, false);
            }
            all &= clear;
            if !clear && self.mode == Mode::Act {
                return false;
            }
        }
        all
    }

    async fn up(&mut self, kept: &[&[&'static dyn AnyStage<K>]]) -> bool {
        let (mut missing, mut whole) = (false, true);
        for rung in kept {
            let turns = join_all(rung.iter().map(|stage| self.raise(*stage, missing))).await;
            for turn in turns {
                let made = turn.planned.as_ref().is_some_and(|p| p.action == Action::Make);
                whole &= self.note(turn, true);
                // A plan goes on: above what is yet to be made all is absent.
                missing |= made;
            }
            if !whole && self.mode == Mode::Act {
                return false;
            }
        }
        whole
    }

    async fn lower(&self, stage: &'static dyn AnyStage<K>, hold: Option<&str>) -> Turn<K> {
        let mut turn = Turn {
            name: stage.name(),
            outcome: Ok(Outcome::Done),
            looked: None,
            planned: None,
            acted: false,
        };
        match self.look(stage).await {
            Ok(looked) if !looked.present => return turn,
            Ok(looked) => turn.looked = Some(looked),
            Err(e) => turn.outcome = Err(e),
        }
        if let Some(hold) = hold {
            turn.outcome = Ok(Outcome::Wait(Why::new("InUse", hold)));
        } else if self.mode == Mode::Plan {
            turn.planned = Some(Planned::undo(self.object, stage.name()));
            turn.outcome = Ok(Outcome::Wait(Why::new("NotWanted", "it is to be taken down")));
        } else {
            turn.acted = true;
            turn.outcome = match self.told("undo", stage, stage.undo(self.cx, self.object)).await {
                Ok(Undone::Done) => {
                    // What was seen of it is not so any more: the status must not tell it until the next pass.
                    turn.looked = None;
                    Ok(Outcome::Done)
                }
                Ok(Undone::Pending(what)) => Ok(Outcome::Wait(Why::new("Stopping", what))),
                Err(e) => Err(e),
            };
        }
        turn
    }

    /// `missing`: a rung below is not there (plan only), so neither is this stage.
    async fn raise(&self, stage: &'static dyn AnyStage<K>, missing: bool) -> Turn<K> {
        let mut turn = Turn {
            name: stage.name(),
            outcome: Ok(Outcome::Done),
            looked: None,
            planned: None,
            acted: false,
        };
        if missing {
            turn.planned = Some(Planned::new(
                self.object,
                stage.name(),
                Action::Make,
                &Why::new("Absent", ""),
            ));
            return turn;
        }
        turn.outcome = match self.look(stage).await {
            Err(e) => Err(e),
            Ok(looked) => {
                let step = looked.step.clone();
                turn.looked = Some(looked);
                self.take(stage, step, &mut turn).await
            }
        };
        turn
    }

    async fn take(&self, stage: &'static dyn AnyStage<K>, step: Step, turn: &mut Turn<K>) -> Result<Outcome> {
        let (action, why) = match &step {
            Step::Keep => return Ok(Outcome::Done),
            Step::Wait(why) => return Ok(Outcome::Wait(why.clone())),
            Step::Lost(why) => {
                turn.planned = Some(Planned::new(self.object, stage.name(), Action::End, why));
                return Ok(Outcome::Lost(why.clone()));
            }
            Step::Make(why) => (Action::Make, why),
            Step::Change(why) => (Action::Change, why),
            Step::Remake(why) => (Action::Remake, why),
        };
        if self.mode == Mode::Plan {
            turn.planned = Some(Planned::new(self.object, stage.name(), action, why));
            return Ok(Outcome::Wait(why.clone()));
        }
        turn.acted = true;
        if action == Action::Remake {
            info!(stage = stage.name(), reason = why.reason, "repairing: {}", why.message);
            let labels = [("kind", K::KIND), ("stage", stage.name())];
            self.cx.store.meter().count("reconcile_repairs_total", &labels);
        }
        self.bounded("act", stage, stage.act(self.cx, self.object, &step))
            .await?;
        let after = self.look(stage).await?;
        let step = after.step.clone();
        turn.looked = Some(after);
        match step {
            Step::Keep => Ok(Outcome::Done),
            Step::Lost(why) => Ok(Outcome::Lost(why)),
            Step::Make(why) | Step::Change(why) | Step::Remake(why) | Step::Wait(why) => Ok(Outcome::Wait(why)),
        }
    }

    async fn look(&self, stage: &'static dyn AnyStage<K>) -> Result<Looked<K>> {
        self.bounded("look", stage, stage.look(self.cx, self.object)).await
    }

    async fn bounded<T>(
        &self,
        op: &'static str,
        stage: &'static dyn AnyStage<K>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        match timeout(BOUND, self.told(op, stage, work)).await {
            Ok(result) => result,
            Err(_) => Err(Error::Stuck {
                op,
                object: stage.name().to_owned(),
                seconds: BOUND.as_secs(),
            }),
        }
    }

    async fn told<T>(&self, op: &str, stage: &'static dyn AnyStage<K>, work: impl Future<Output = T>) -> T {
        let since = self.cx.world.clock.now_ns();
        tokio::pin!(work);
        if let Ok(done) = timeout(LONG, &mut work).await {
            return done;
        }
        if self.mode == Mode::Act {
            self.tell_long(op, stage.name(), since);
        }
        work.await
    }

    /// Says in the conditions what has been running `since`; the end of the pass replaces them.
    fn tell_long(&self, op: &str, stage: &'static str, since: i64) {
        let Some(now) = self.cx.store.get::<K>(self.object.uid()) else {
            return;
        };
        let mut status = now.status.clone();
        let all = K::conditions_mut(&mut status);
        all.retain(|condition| condition.stage != stage);
        let message = format!("its {op} has not come back yet");
        all.push(Condition {
            since,
            ..conditions::fails(stage, "UnderWay", message, false)
        });
        self.cx.store.set_status::<K>(self.object.uid(), status);
    }

    /// Counts what was tried; a look that found all well is nothing.
    fn meter(&self, turn: &Turn<K>) {
        let result = match &turn.outcome {
            Ok(Outcome::Done) if !turn.acted => return,
            Ok(Outcome::Done) => "done",
            Ok(Outcome::Wait(_)) | Err(Error::Pending(_)) => "waiting",
            Ok(Outcome::Lost(_)) => "lost",
            Err(_) => "failed",
        };
        if self.mode == Mode::Act {
            let labels = [("kind", K::KIND), ("stage", turn.name), ("result", result)];
            self.cx.store.meter().count("reconcile_stages_total", &labels);
        }
    }

    /// Takes down what a stage's turn came to; true if it left nothing to do.
    fn note(&mut self, turn: Turn<K>, wanted: bool) -> bool {
        self.meter(&turn);
        self.plan.extend(turn.planned);
        self.acted += usize::from(turn.acted);
        let done = match turn.outcome {
            Ok(Outcome::Done) => {
                if wanted {
                    self.conditions.push(conditions::holds(turn.name));
                }
                true
            }
            Ok(Outcome::Wait(why)) => {
                self.conditions
                    .push(conditions::fails(turn.name, why.reason, why.message, false));
                false
            }
            Ok(Outcome::Lost(why)) => {
                self.conditions
                    .push(conditions::fails(turn.name, why.reason, why.message.clone(), true));
                self.lost.get_or_insert(why);
                false
            }
            Err(e) => {
                let permanent = e.class() != Class::Transient;
                if !matches!(e, Error::Pending(_)) {
                    warn!(stage = turn.name, permanent, "{e}");
                }
                self.conditions
                    .push(conditions::fails(turn.name, e.reason(), e.to_string(), permanent));
                self.error.get_or_insert(e);
                false
            }
        };
        if let Some(looked) = turn.looked {
            self.reports.push(looked.report);
        }
        done
    }
}

/// Is the condition `Ready` (or any other) true?
pub fn truth(conditions: &[Condition], stage: &str) -> Truth {
    conditions
        .iter()
        .find(|c| c.stage == stage)
        .map_or(Truth::Unknown, |c| c.status)
}
