//! ExecSync: a program in a running container, its output returned.

use state::session::{Outcome, Wish};

use super::session::{self, Ask};
use super::v1;
use crate::call::Call;
use crate::error::{Error, Result};
use crate::services::Services;
use crate::translate;

pub(super) async fn sync(
    services: &Services,
    call: &Call,
    request: v1::ExecSyncRequest,
) -> Result<v1::ExecSyncResponse> {
    if request.cmd.is_empty() {
        return Err(Error::invalid("cmd", "must not be empty"));
    }
    for (i, word) in request.cmd.iter().enumerate() {
        translate::no_nul(&format!("cmd[{i}]"), word)?;
    }
    if request.timeout < 0 {
        return Err(Error::invalid("timeout", "must be 0 (no limit) or a number of seconds"));
    }
    let ask = Ask {
        container: &request.container_id,
        wish: Wish::Exec(request.cmd),
        timeout: request.timeout,
        noun: "exec",
    };
    match session::outcome(services, call, ask).await? {
        Outcome::Done {
            stdout,
            stderr,
            exit_code,
        } => Ok(v1::ExecSyncResponse {
            stdout,
            stderr,
            exit_code,
        }),
        other => Err(Error::Unavailable(format!("exec: unexpected outcome {other:?}"))),
    }
}
