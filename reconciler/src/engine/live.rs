//! Is a process of a run record alive? Identity is boot, pid and start time together.

use std::path::Path;

use shim::record::RunRecord;

/// The pid, if the record says "started", not "ended", and that very process still runs.
pub fn pid(record: &RunRecord, boot_id: &str) -> Option<i32> {
    let start = record.start.as_ref()?;
    if record.end.is_some() || start.boot_id != boot_id {
        return None;
    }
    let pid = i32::try_from(start.pid).ok()?;
    (start_ticks(pid)? == start.start_ticks).then_some(pid)
}

/// Field 22 of `/proc/PID/stat` (proc_pid_stat(5)); `None` if there is no such process or it is a zombie.
fn start_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The second field may hold spaces and parentheses.
    let mut rest = stat.rsplit_once(") ")?.1.split(' ');
    match rest.next()? {
        "Z" | "X" => None,
        _ => rest.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shim::record::Start;

    #[test]
    fn another_boot_or_start_time_is_another_process() {
        let me = std::process::id();
        let ticks = start_ticks(me as i32).unwrap();
        let record = |pid, start_ticks, boot: &str| RunRecord {
            start: Some(Start {
                pid,
                start_ticks,
                boot_id: boot.to_owned(),
                ..Start::default()
            }),
            ..RunRecord::default()
        };
        assert_eq!(pid(&record(me, ticks, "b"), "b"), Some(me as i32));
        assert_eq!(pid(&record(me, ticks + 1, "b"), "b"), None);
        assert_eq!(pid(&record(me, ticks, "a"), "b"), None);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = child.id();
        child.wait().unwrap();
        assert_eq!(pid(&record(gone, ticks, "b"), "b"), None);
    }
}
