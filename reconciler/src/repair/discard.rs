//! Records that cannot be read are thrown away by name only; what they own is then nobody's, and swept.

use std::path::PathBuf;
use std::sync::Arc;

use state::Kind;
use state::container::ContainerKind;
use state::image::ImageKind;
use state::node::NodeKind;
use state::pod::PodKind;

use super::finding::{Finding, Severity};
use super::{Permit, doctor};
use crate::engine::Context;
use crate::engine::plan::{Action, Planned};
use crate::engine::record::COPY;
use crate::engine::stage::Risk;
use crate::error::Result;

/// The steps that are permitted.
pub fn due(cx: &Context, permit: &Permit) -> Vec<Planned> {
    let steps = cx.quarantined().into_iter().map(|(kind, uid, why)| Planned {
        kind,
        name: uid.clone(),
        uid,
        stage: "record".to_owned(),
        action: Action::Erase,
        reason: "Quarantined".to_owned(),
        message: format!("it cannot be read ({why}); what it owns goes with it"),
        risk: Risk::C,
        undo: Action::Erase.way_back().to_owned(),
    });
    steps.filter(|step| permit.risks(step)).collect()
}

/// Takes those that are allowed; answers them.
pub async fn run(cx: &Arc<Context>, permit: &Permit) -> Result<Vec<Planned>> {
    let mut done = due(cx, permit);
    done.retain(|step| permit.allows(step));
    for step in &done {
        cx.store.discard(&step.kind, &step.uid).await?;
        tracing::warn!(
            kind = step.kind,
            uid = step.uid,
            "unreadable record thrown away, as asked"
        );
    }
    if !done.is_empty() {
        let nodes = cx.store.list::<NodeKind>();
        nodes
            .iter()
            .for_each(|node| cx.queues.nodes.look(node.uid(), "record thrown away"));
    }
    Ok(done)
}

/// What is quarantined, with both ways out of it.
pub fn findings(cx: &Context) -> Vec<Finding> {
    let of = |(kind, uid, why): (String, String, String)| {
        let copy = dir(cx, &kind, &uid).join(COPY);
        let message = format!(
            "its record cannot be read ({why}); what it owns is left as it is. With the record's text back in {} and \
             the daemon restarted it is as before; the command throws the record away, and with it what it owns",
            copy.display()
        );
        let size = cx.world.files.read(&copy).ok().flatten().map(|text| text.len() as u64);
        let finding = Finding::new("record-quarantined", Severity::Human, format!("{kind} {uid}"), message);
        Finding {
            size,
            risk: Risk::C,
            ..finding.repair(format!("reconcile --once --object {uid}"))
        }
    };
    cx.quarantined().into_iter().map(of).collect()
}

fn dir(cx: &Context, kind: &str, uid: &str) -> PathBuf {
    let paths = &cx.world.paths;
    match kind {
        ImageKind::KIND => paths.root.join("images").join(uid),
        PodKind::KIND => paths.root.join("declared").join(uid),
        ContainerKind::KIND => doctor::container(cx, uid).unwrap_or_else(|| paths.container("SANDBOX", uid)),
        _ => paths.pod(uid),
    }
}
