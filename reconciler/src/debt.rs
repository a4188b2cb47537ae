//! Debt: an undo that is still owed. A Stop or Remove is never hostage to the network: after a bound its CNI DEL
//! becomes a record with the attachment in it, retried until it succeeds.

use std::sync::Arc;
use std::time::Duration;

use state::debt::{DebtKind, DebtSpec, DebtStatus};
use state::store::New;
use state::{Debt, Meta, PodSandbox};

use crate::engine::controller::Next;
use crate::engine::{Context, conditions};
use crate::error::Result;
use crate::world::linux::network::Attachment;

/// How long a failing undo holds up its caller (promises, decision 2).
pub const PATIENCE: Duration = Duration::from_secs(25);
const PART: &str = "network";

/// Writes down that the network of a sandbox is still to be taken back.
pub async fn owe(cx: &Context, sandbox: &PodSandbox, attachment: &Attachment, reason: String) -> Result<()> {
    let input = serde_json::to_value(attachment).unwrap_or_default();
    let spec = DebtSpec {
        part: PART.to_owned(),
        object: sandbox.uid().to_owned(),
        input,
        reason,
    };
    shim::fault::point("debt.owe.before");
    let meta = Meta {
        name: format!("{PART}/{}", sandbox.uid()),
        ..Meta::default()
    };
    match cx.store.create::<DebtKind>(New { meta, spec }).await {
        Ok(_) | Err(state::Error::AlreadyExists { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Tries once more.
pub async fn pass(cx: &Arc<Context>, object: &Arc<Debt>) -> Result<Next> {
    if object.meta.deleted() {
        cx.store.erase::<DebtKind>(object.uid()).await?;
        return Ok(Next::Gone);
    }
    let paid = match Attachment::of_value(object.spec.input.clone()) {
        Ok(attachment) => cx.world.network.detach(&attachment, None).await,
        // Never dropped: a newer program may be able to pay it.
        Err(e) => Err(e),
    };
    let mut status = DebtStatus {
        observed_generation: object.meta.generation,
        attempts: object.status.attempts + 1,
        conditions: Vec::new(),
    };
    match paid {
        Ok(()) => {
            shim::fault::point("debt.pay.after");
            tracing::info!(sandbox = object.spec.object, "owed network teardown done");
            cx.store.delete::<DebtKind>(object.uid()).await?;
            Ok(Next::Await)
        }
        Err(e) => {
            status.conditions = vec![conditions::fails("Ready", "Owed", e.to_string(), false)];
            cx.store.set_status::<DebtKind>(object.uid(), status);
            Err(e.into())
        }
    }
}
