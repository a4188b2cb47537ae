//! Is a process of a run record alive? Identity is boot, pid and start time together.

use shim::record::RunRecord;

use crate::world::World;

/// The pid, if the record says "started", not "ended", and that very process still runs.
pub fn pid(world: &World, record: &RunRecord) -> Option<i32> {
    let start = record.start.as_ref()?;
    if record.end.is_some() || start.boot_id != world.clock.boot_id {
        return None;
    }
    let pid = i32::try_from(start.pid).ok()?;
    (world.shims.start_ticks(pid)? == start.start_ticks).then_some(pid)
}
