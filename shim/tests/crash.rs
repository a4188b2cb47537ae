//! A shim killed at any moment of a start: the next one finishes what it finds.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shim::record;
use support::{Pod, is_alive};

/// The files of a shim without processes. (The directories of libcontainer's states stay, empty.)
const OWN: [&str; 3] = ["lock", "shim.log", "sock"];

fn files(pod: &Pod) -> Vec<String> {
    let all = fs::read_dir(&pod.dir).unwrap().map(Result::unwrap);
    let all = all.filter(|entry| !entry.file_type().unwrap().is_dir());
    let mut all: Vec<_> = all.map(|entry| entry.file_name().into_string().unwrap()).collect();
    all.sort_unstable();
    all
}

/// Cut amid the first writing of its task file, or amid the removal of a process, a shim leaves files that belong to no
/// process.
#[tokio::test]
async fn what_belongs_to_no_process_goes() {
    let mut pod = Pod::new().await;
    let living = pod.container("living", &["/hello", "sleep", "1000"]);
    pod.run(&living).await.unwrap();
    let of_living = files(&pod);
    for name in ["torn.new", "living.new", "gone.mark", "gone.making"] {
        fs::write(pod.dir.join(name), "").unwrap();
    }
    pod.replace_shim().await;
    assert_eq!(files(&pod), of_living);
    pod.client.delete("living").await.unwrap();
    assert_eq!(files(&pod), OWN);
    pod.end().await;
}

#[tokio::test]
async fn a_start_cut_off_anywhere_is_finished_or_undone() {
    let mut pod = Pod::new().await;
    let (mut ran, mut failed) = (0, 0);
    for n in 0..40 {
        let id = format!("c{n}");
        let container = pod.container(&id, &["/hello", "sleep", "1000"]);
        let start = async { pod.run(&container).await };
        let kill = async {
            tokio::time::sleep(Duration::from_micros(1000 * n)).await;
            pod.kill_shim();
        };
        let (answer, ()) = tokio::join!(start, kill);
        pod.revive_shim().await;
        let record = record::read(Path::new(&container.request.record))
            .unwrap()
            .unwrap_or_default();
        let state = pod.client.state().await.unwrap();
        if let Some(process) = state
            .processes
            .iter()
            .find(|process| process.id == id && record.end.is_none())
        {
            // Taken over, or about to be written off.
            if process.phase() == shim::api::Phase::Running {
                assert!(is_alive(process.pid));
                assert_eq!(
                    fs::read_link(format!("/proc/{}/exe", process.pid)).unwrap(),
                    Path::new("/hello")
                );
                ran += 1;
            }
        }
        assert!(answer.is_err() || record.start.is_some());
        pod.client.delete(&id).await.unwrap();
        let end = record::read(Path::new(&container.request.record))
            .unwrap()
            .unwrap_or_default()
            .end;
        failed += u32::from(end.as_ref().is_some_and(|end| end.code == 128));
        // Killed before it had even read the request, it has nothing to tell.
        assert!(end.is_some() || record.start.is_none(), "{id}: no end");
        assert_eq!(pod.cgroups(&id), Vec::<PathBuf>::new(), "{id}");
        assert!(!Path::new(&container.request.fifo_dir).exists(), "{id}");
        assert_eq!(files(&pod), OWN, "{id}");
    }
    println!("{ran} ran on, {failed} were written off as not started");
    pod.end().await;
}
