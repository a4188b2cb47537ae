//! What clients ask for, by method: the answer at once, or later when the process has got there.

use std::path::Path;

use prost::Message;
use shim::api::{self, Phase, Request};
use shim::{Code, fault};

use super::{Refusal, Service, internal, invalid};
use crate::log::Log;
use crate::process::{self, Caller, Proc};

impl Service {
    pub(super) fn request(&mut self, caller: Caller, request: Request) {
        let answer = match request.method.as_str() {
            "State" => Ok(Some(self.state().encode_to_vec())),
            "Pause" => decode(&request)
                .and_then(|message| self.start_pause(caller, message))
                .map(|()| None),
            "Run" => decode(&request)
                .and_then(|message| self.start_run(caller, message))
                .map(|()| None),
            "Stop" => decode(&request).and_then(|message| self.stop(message)).map(Some),
            "Kill" => decode(&request).and_then(|message| self.kill(message)).map(Some),
            "Delete" => decode(&request).map(|message| self.delete(caller, message)),
            "ReopenLog" => decode(&request).and_then(|message| self.reopen_log(message)).map(Some),
            "Exec" => decode(&request)
                .and_then(|message| self.start_exec(caller, message))
                .map(|()| None),
            "ExecStream" => decode(&request)
                .and_then(|message| self.start_exec_stream(caller, message))
                .map(|()| None),
            "Attach" => decode(&request)
                .and_then(|message| self.attach(caller, message))
                .map(|()| None),
            "Shutdown" => self.shutdown().map(Some),
            other => Err((Code::Unimplemented, format!("method {other:?} is unknown to this shim"))),
        };
        match answer {
            Ok(None) => {}
            Ok(Some(payload)) => self.answer(caller, Ok(payload)),
            Err(refusal) => self.answer(caller, Err(refusal)),
        }
    }

    pub fn find(&mut self, id: &str) -> Result<&mut Proc, Refusal> {
        let known = self.procs.iter_mut().find(|proc| proc.id() == id);
        known.ok_or_else(|| (Code::NotFound, format!("no process {id:?} in this shim")))
    }

    fn state(&self) -> api::StateResponse {
        let process = |proc: &Proc| {
            let (log_dev, log_ino) = proc.log.as_ref().map_or((0, 0), Log::file_id);
            api::Process {
                id: proc.id().into(),
                pid: proc.pid,
                phase: proc.phase as i32,
                adopted: proc.pidfd.is_some(),
                dropped_bytes: proc.log.as_ref().map_or(0, Log::dropped_ever),
                execs: self.execs.iter().filter(|exec| exec.container == proc.key).count() as u32,
                started_at: proc.started.started_at,
                log_dev,
                log_ino,
            }
        };
        api::StateResponse {
            pid: std::process::id(),
            namespace: self.identity.namespace.clone(),
            name: self.identity.name.clone(),
            uid: self.identity.uid.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            processes: self.procs.iter().map(process).collect(),
        }
    }

    fn stop(&mut self, request: api::StopRequest) -> Result<Vec<u8>, Refusal> {
        if !(0..=64).contains(&request.signal) {
            return Err(invalid("signal", format!("{} is none", request.signal)));
        }
        let proc = self.find(&request.id)?;
        if proc.phase == Phase::Running {
            proc.stop(request.signal, request.grace_ns).map_err(internal)?;
        } else if proc.phase == Phase::Starting {
            return Err((
                Code::FailedPrecondition,
                format!("{} is still being started", request.id),
            ));
        }
        Ok(Vec::new())
    }

    fn kill(&mut self, request: api::KillRequest) -> Result<Vec<u8>, Refusal> {
        let proc = self.find(&request.id)?;
        proc.signal(request.signal).map_err(internal)?;
        Ok(Vec::new())
    }

    fn delete(&mut self, caller: Caller, request: api::DeleteRequest) -> Option<Vec<u8>> {
        let Ok(proc) = self.find(&request.id) else {
            return Some(Vec::new());
        };
        fault::point("shim.delete.before");
        proc.deletes.push(caller);
        if proc.phase != Phase::Stopping {
            proc.kill_at = Some(0);
        }
        None
    }

    fn reopen_log(&mut self, request: api::ReopenLogRequest) -> Result<Vec<u8>, Refusal> {
        let proc = self.find(&request.id)?;
        let path = Some(Path::new(&request.path)).filter(|path| !path.as_os_str().is_empty());
        if path.is_some_and(|path| !path.is_absolute()) {
            return Err(invalid("path", format!("{:?} is not absolute", request.path)));
        }
        let Some(log) = proc.log.as_mut().filter(|_| proc.phase == Phase::Running) else {
            return Err((
                Code::FailedPrecondition,
                format!("{} is not running with a log", request.id),
            ));
        };
        log.reopen(path)
            .map_err(|error| (Code::Internal, format!("open log {:?}: {error}", request.path)))?;
        if let (Some(run), true) = (&mut proc.task.run, path.is_some()) {
            run.log_path = request.path;
            let task = proc.task.clone();
            process::save(&self.dir, &task).map_err(internal)?;
        }
        Ok(Vec::new())
    }

    fn shutdown(&mut self) -> Result<Vec<u8>, Refusal> {
        if let Some(proc) = self.procs.first() {
            let (id, count) = (proc.id(), self.procs.len());
            return Err((Code::FailedPrecondition, format!("{count} processes live, {id} first")));
        }
        fault::point("shim.shutdown.before");
        self.is_ending = true;
        Ok(Vec::new())
    }
}

fn decode<M: Message + Default>(request: &Request) -> Result<M, Refusal> {
    M::decode(&*request.payload).map_err(|error| (Code::InvalidArgument, format!("request: {error}")))
}
