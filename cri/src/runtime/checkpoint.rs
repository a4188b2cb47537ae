//! CheckpointContainer: the state of a running container, written to an archive by CRIU; the container runs on.

use state::session::{Outcome, Wish};

use super::session::{self, Ask};
use super::v1;
use crate::call::Call;
use crate::error::{Error, Result};
use crate::services::Services;
use crate::translate;

/// Seconds that a request without a `timeout` gets: as long as any other call.
const DEFAULT: i64 = 240;

pub(super) async fn container(
    services: &Services,
    call: &Call,
    request: v1::CheckpointContainerRequest,
) -> Result<v1::CheckpointContainerResponse> {
    translate::absolute("location", &request.location)?;
    let timeout = match request.timeout {
        0 => DEFAULT,
        1.. => request.timeout,
        _ => {
            let problem = "must be 0 (the default, 240 s) or a number of seconds";
            return Err(Error::invalid("timeout", problem));
        }
    };
    let ask = Ask {
        container: &request.container_id,
        wish: Wish::Checkpoint(request.location),
        timeout,
        noun: "checkpoint",
    };
    match session::outcome(services, call, ask).await? {
        Outcome::Saved => Ok(v1::CheckpointContainerResponse {}),
        Outcome::Misplaced(problem) => Err(Error::invalid("location", problem)),
        Outcome::Unsupported(why) => Err(Error::Unimplemented {
            rpc: "CheckpointContainer",
            why,
        }),
        other => Err(Error::Unavailable(format!("checkpoint: unexpected outcome {other:?}"))),
    }
}
