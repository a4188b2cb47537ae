//! What clients do with a node.

use super::client::{APP, Op};

const POD: &str = "web";

/// Each by its name.
pub fn all() -> Vec<(&'static str, Vec<Op>)> {
    let twice = |op: Op| Op::Twice(Box::new(op));
    let cancelled = |op: Op, ms: u64| Op::Cancelled(Box::new(op), ms);
    let up = || vec![Op::Pull(APP), Op::Run(POD)];
    let with = |more: Vec<Op>| [up(), more].concat();
    let running = |args| with(vec![Op::Create(POD, "c", args), Op::Start("c")]);
    vec![
        (
            "pull",
            vec![Op::Pull(APP), Op::Pull("registry.sim/other:1"), Op::RemoveImage(APP)],
        ),
        ("sandbox", vec![Op::Run(POD), Op::StopPod(POD), Op::RemovePod(POD)]),
        (
            "life",
            [
                running(&["run"]),
                vec![Op::Stop("c", 10), Op::Remove("c"), Op::StopPod(POD), Op::RemovePod(POD)],
            ]
            .concat(),
        ),
        (
            "exit by itself",
            [
                running(&["exit", "3", "700"]),
                vec![Op::AwaitExit("c"), Op::Sleep(500), Op::Pull("registry.sim/other:1")],
            ]
            .concat(),
        ),
        (
            "exit at once",
            [running(&["exit", "0", "0"]), vec![Op::AwaitExit("c")]].concat(),
        ),
        (
            "stop with grace",
            [running(&["stubborn"]), vec![Op::Stop("c", 3), Op::Remove("c")]].concat(),
        ),
        (
            "left child",
            [running(&["fork", "1", "300"]), vec![Op::AwaitExit("c")]].concat(),
        ),
        ("remove running", [running(&["run"]), vec![Op::RemovePod(POD)]].concat()),
        (
            "update",
            [
                running(&["run"]),
                vec![Op::Update("c", 32 << 20), Op::Update("c", 96 << 20)],
            ]
            .concat(),
        ),
        (
            "joined",
            vec![
                Op::Pull(APP),
                twice(Op::Run(POD)),
                twice(Op::Create(POD, "c", &["run"])),
                Op::Start("c"),
                twice(Op::Stop("c", 1)),
                twice(Op::RemovePod(POD)),
            ],
        ),
        (
            "cancelled",
            vec![
                Op::Pull(APP),
                cancelled(Op::Run(POD), 3),
                Op::Run(POD),
                cancelled(Op::Create(POD, "c", &["run"]), 3),
                Op::Create(POD, "c", &["run"]),
                cancelled(Op::Start("c"), 2),
                Op::Sleep(3000),
                cancelled(Op::Stop("c", 1), 2),
                Op::Stop("c", 1),
                cancelled(Op::Pull("registry.sim/other:1"), 2),
                cancelled(Op::RemovePod(POD), 3),
            ],
        ),
        (
            "never asked again",
            vec![Op::Pull(APP), cancelled(Op::Run(POD), 2), Op::Sleep(400_000)],
        ),
        (
            "full disk",
            with(vec![
                Op::Create(POD, "c", &["run"]),
                Op::Start("c"),
                Op::Fill(true),
                Op::Refused(Box::new(Op::Create(POD, "more", &["run"]))),
                Op::Refused(Box::new(Op::Run("other"))),
                Op::Exec("c", 10),
                Op::Stop("c", 1),
                Op::Remove("c"),
                Op::StopPod(POD),
                Op::RemovePod(POD),
                Op::Fill(false),
                Op::Run("again"),
            ]),
        ),
        (
            "exec and rotation",
            [
                running(&["run"]),
                vec![
                    Op::Exec("c", 50),
                    Op::LoseLog(POD, "c", true),
                    Op::Reopen("c"),
                    Op::LoseLog(POD, "c", false),
                    Op::Exec("c", 60_000),
                    cancelled(Op::Exec("c", 1000), 300),
                ],
            ]
            .concat(),
        ),
        (
            "user namespace",
            vec![
                Op::Pull(APP),
                Op::RunUser(POD),
                Op::Create(POD, "c", &["exit", "2", "500"]),
                Op::Start("c"),
                Op::AwaitExit("c"),
                Op::StopPod(POD),
            ],
        ),
        (
            "two containers",
            with(vec![
                Op::Create(POD, "a", &["run"]),
                Op::Create(POD, "b", &["exit", "1", "100"]),
                Op::Start("a"),
                Op::Start("b"),
                Op::AwaitExit("b"),
                Op::Remove("b"),
                Op::StopPod(POD),
            ]),
        ),
        (
            "declared",
            vec![
                Op::Apply("app", &["run"], "Always"),
                Op::AwaitDeclared("app", true),
                Op::Apply("app", &["exit", "0", "50"], "Never"),
                Op::AwaitDeclared("app", false),
                Op::DeleteDeclared("app"),
            ],
        ),
        (
            "declared, restarted",
            vec![
                Op::Apply("app", &["exit", "1", "2000"], "OnFailure"),
                Op::Sleep(30_000),
                Op::DeleteDeclared("app"),
            ],
        ),
    ]
}
