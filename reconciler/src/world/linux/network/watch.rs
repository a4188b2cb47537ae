//! Notices harm to the built-in network's links as it happens: a trigger to look again, never a fact.

use futures::StreamExt;
use rtnetlink::packet_core::NetlinkPayload;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::sync::mpsc::{Receiver, channel};

use super::bridge::{bridge_name, mark};
use super::error::{Result, system};
use super::links::{Link, link};

/// What to look at again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Drift {
    /// The network of this sandbox.
    Sandbox(String),
    /// Every sandbox on the bridge.
    All,
}

/// Follows the links of the calling thread's namespace. Only deletion, going down and leaving the bridge count, so that
/// making a pod is not news. Ends when the receiver is dropped.
pub fn drift(instance: &str) -> Result<Receiver<Drift>> {
    let (connection, handle, mut messages) =
        new_multicast_connection(&[MulticastGroup::Link]).map_err(system("follow", "links"))?;
    tokio::spawn(connection);
    let (bridge, prefix) = (bridge_name(instance), format!("{}:", mark(instance)));
    let (send, receive) = channel(1024);
    tokio::spawn(async move {
        // The connection ends with its handle.
        let _handle = handle;
        loop {
            let message = tokio::select! {
                message = messages.next() => message,
                () = send.closed() => return,
            };
            let Some((message, _)) = message else { return };
            if let Some(drift) = harm(message.payload, &bridge, &prefix) {
                // Of a full queue the rest is lost, which costs time only: the next resync looks at all.
                let _ = send.try_send(drift);
            }
        }
    });
    Ok(receive)
}

fn harm(payload: NetlinkPayload<RouteNetlinkMessage>, bridge: &str, prefix: &str) -> Option<Drift> {
    let harmed = |link: Link| {
        let uid = link
            .alias
            .as_ref()
            .and_then(|a| a.strip_prefix(prefix))
            .map(str::to_string);
        if link.name == bridge {
            Some(Drift::All)
        } else {
            uid.map(Drift::Sandbox)
        }
    };
    match payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(message)) => harmed(link(message)),
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message)) => {
            let link = link(message);
            let whole = link.up && (link.controller.is_some() || link.name == bridge);
            if whole { None } else { harmed(link) }
        }
        // Messages were lost, or something else came: look at all.
        NetlinkPayload::Overrun(_) => Some(Drift::All),
        _ => None,
    }
}
