//! ExecSync: a program in a running container, its output returned (CRI ExecSync).

use shim::Code;
use shim::api::ExecRequest;
use state::session::Outcome;
use state::{Container, Session};

use crate::engine::Context;

/// Runs it to its end; dropping the future kills the program.
pub(super) async fn run(cx: &Context, object: &Session, container: &Container, command: &[String]) -> Outcome {
    let Some(client) = cx.world.shims.find(&container.spec.sandbox).await else {
        return Outcome::Failed("the pod's shim is being replaced, try again".to_owned());
    };
    let request = ExecRequest {
        id: container.uid().to_owned(),
        args: command.to_vec(),
        env: Vec::new(),
        cwd: String::new(),
        timeout_ns: object.spec.timeout_seconds.max(0).saturating_mul(1_000_000_000),
        limit: 0,
    };
    match client.exec(request).await {
        Ok(output) if output.timed_out => Outcome::TimedOut,
        Ok(output) => Outcome::Done {
            stdout: output.stdout,
            stderr: output.stderr,
            exit_code: output.exit_code,
        },
        Err(e) => match e.code() {
            Some(Code::NotFound | Code::FailedPrecondition) => Outcome::NotRunning(e.to_string()),
            Some(Code::DeadlineExceeded) => Outcome::TimedOut,
            _ => Outcome::Failed(e.to_string()),
        },
    }
}
