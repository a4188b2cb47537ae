//! Drift of links: the kernel tells when one of ours goes, rtnetlink(7).

use std::sync::Arc;

use futures::StreamExt;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use rtnetlink::MulticastGroup;
use rtnetlink::packet_core::NetlinkPayload;

use super::network::bridge::pod_mark;
use crate::engine::Context;

/// Looks again at every sandbox whose host link went. Losing a message costs time only: the resync compares links too.
pub async fn watch(cx: Arc<Context>) {
    let (connection, _handle, mut messages) = match rtnetlink::new_multicast_connection(&[MulticastGroup::Link]) {
        Ok(parts) => parts,
        Err(e) => {
            tracing::error!("cannot watch links, drift of the network is noticed at the next resync only: {e}");
            return;
        }
    };
    tokio::spawn(connection);
    let prefix = pod_mark(&cx.world.paths.instance, "");
    while let Some((message, _)) = messages.next().await {
        let NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link)) = message.payload else { continue };
        let alias = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::IfAlias(alias) => Some(alias.clone()),
            _ => None,
        });
        if let Some(uid) = alias.as_deref().and_then(|alias| alias.strip_prefix(&prefix)) {
            cx.queues.sandboxes.look(uid, "link gone");
        }
    }
}
