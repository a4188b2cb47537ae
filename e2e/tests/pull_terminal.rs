//! `reconcile images pull` on a terminal, of which this test is the screen; and where there is none.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::node::{Node, shown};
use e2e::registry::{Fault, Server};
use e2e::served::{Served, layer, serve};
use nix::pty::{Winsize, openpty};

const COLUMNS: usize = 120;

/// What is seen on a terminal, as far as progress bars use one (ECMA-48).
#[derive(Default)]
struct Screen {
    lines: Vec<Vec<char>>,
    row: usize,
    column: usize,
    hidden: bool,
}

impl Screen {
    fn show(&mut self, text: &str) {
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '\r' => self.column = 0,
                '\n' => self.row += 1,
                '\u{1b}' if chars.peek() == Some(&'[') => {
                    let body: String = std::iter::from_fn(|| chars.next_if(|c| !c.is_ascii_alphabetic())).collect();
                    self.control(body.trim_start_matches('['), chars.next().unwrap_or_default());
                }
                c => self.put(c),
            }
        }
    }

    fn put(&mut self, c: char) {
        if self.column == COLUMNS {
            (self.row, self.column) = (self.row + 1, 0);
        }
        let column = self.column;
        let line = self.line();
        if line.len() <= column {
            line.resize(column + 1, ' ');
        }
        line[column] = c;
        self.column += 1;
    }

    fn line(&mut self) -> &mut Vec<char> {
        if self.lines.len() <= self.row {
            self.lines.resize(self.row + 1, Vec::new());
        }
        &mut self.lines[self.row]
    }

    fn control(&mut self, body: &str, end: char) {
        let number = body.parse().unwrap_or(1);
        match (body, end) {
            (_, 'A') => self.row = self.row.saturating_sub(number),
            (_, 'B') => self.row += number,
            ("2", 'K') => self.line().clear(),
            ("" | "0", 'K') => {
                let column = self.column;
                self.line().truncate(column);
            }
            ("" | "0", 'J') => {
                let (row, column) = (self.row, self.column);
                self.line().truncate(column);
                self.lines.truncate(row + 1);
            }
            ("?25", 'l' | 'h') => self.hidden = end == 'l',
            (_, 'm') => {}
            other => panic!("a control that no bar needs: {other:?}"),
        }
    }

    fn text(&self) -> Vec<String> {
        let text = |line: &Vec<char>| line.iter().collect::<String>().trim_end().to_owned();
        let mut lines: Vec<_> = self.lines.iter().map(text).collect();
        while lines.last().is_some_and(String::is_empty) {
            lines.pop();
        }
        lines
    }
}

/// Runs it with a terminal for all three streams; each state of the screen, and whether it succeeded.
fn on_a_terminal(mut command: Command) -> Result<(Vec<Vec<String>>, Screen, bool)> {
    let size = Winsize {
        ws_row: 40,
        ws_col: COLUMNS as u16,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let pty = openpty(Some(&size), None)?;
    let end = || -> Result<OwnedFd> { Ok(pty.slave.try_clone()?) };
    command.env("TERM", "xterm").stdin(end()?).stdout(end()?).stderr(end()?);
    let mut child = command.spawn()?;
    drop(command);
    drop(pty.slave);
    let (mut screen, mut states, mut master, mut buffer) =
        (Screen::default(), Vec::new(), File::from(pty.master), [0; 4096]);
    let mut left = Vec::new();
    // EIO: nobody has the other end any more.
    while let Ok(n @ 1..) = master.read(&mut buffer) {
        left.extend_from_slice(&buffer[..n]);
        let whole = match std::str::from_utf8(&left) {
            Ok(text) => text.len(),
            Err(e) => e.valid_up_to(),
        };
        // A control that was cut in two waits for its rest.
        let text = String::from_utf8(left[..whole].to_vec())?;
        let whole = match text.rfind('\u{1b}') {
            Some(at) if !text[at + 1..].contains(|c: char| c.is_ascii_alphabetic()) => at,
            _ => whole,
        };
        screen.show(&text[..whole]);
        left.drain(..whole);
        states.push(screen.text());
    }
    Ok((states, screen, child.wait()?.success()))
}

fn hex(image: &Served, layer: usize) -> &str {
    image.blobs[layer].0.get(7..19).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn bars_show_bytes_rate_and_time_and_end_clean() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let image = serve(&server, "bars", &[layer(50, 64 << 10), layer(51, 2 << 20)]);
    server.fault(
        &image.blobs[1].0,
        Fault::Trickle(64 << 10, Duration::from_millis(40)),
        1,
    );
    let command = node.command(&["images", "pull", &image.name])?;
    let (states, screen, success) = tokio::task::spawn_blocking(move || on_a_terminal(command)).await??;
    let end = screen.text();
    ensure!(success, "{end:#?}");

    // While it runs: a line for each layer, and of the slow one how far, how fast, how long yet.
    let slow = |state: &Vec<String>| state.iter().find(|line| line.starts_with(hex(&image, 1))).cloned();
    let size = format!("{:.2} MiB", image.blobs[1].1 as f64 / f64::from(1 << 20));
    let of = format!("iB/{size}");
    let partly = |line: &String| {
        let words: Vec<_> = line.split_whitespace().collect();
        let rate = words.iter().any(|word| word.ends_with("iB/s"));
        let left = words
            .last()
            .is_some_and(|word| word.ends_with('s') && word.as_bytes()[0].is_ascii_digit());
        rate && left && line.contains('█') && line.contains('░') && line.contains(&of)
    };
    let lines: Vec<_> = states.iter().filter_map(slow).collect();
    let moving: std::collections::BTreeSet<_> = lines.iter().filter(|line| partly(line)).collect();
    ensure!(moving.len() >= 3, "the bar does not move: {lines:#?}");

    // At the end: each layer once and whole, then what was asked for, below them.
    ensure!(!screen.hidden, "the cursor is hidden");
    ensure!(end.len() == 5, "{end:#?}");
    ensure!(end[0] == format!("pulling {}", image.name), "{end:#?}");
    for (n, line) in end[1..3].iter().enumerate() {
        ensure!(line.starts_with(hex(&image, n)) && !line.contains('░'), "{end:#?}");
    }
    ensure!(end[2].contains(&format!("{size}/{size}")), "{end:#?}");
    let fast: Vec<_> = lines.iter().filter(|line| line.contains("GiB/s")).collect();
    ensure!(fast.is_empty(), "no registry is as fast: {fast:#?}");
    let id = node.cri.image(&image.name).await?.context("pulled")?.id;
    ensure!(end[3].starts_with("digest: sha256:") && end[4] == id, "{end:#?}");

    // What is here already has no bar.
    let command = node.command(&["images", "pull", &image.name])?;
    let (_, screen, _) = tokio::task::spawn_blocking(move || on_a_terminal(command)).await??;
    let again = screen.text();
    ensure!(
        again[1..3].iter().all(|line| line.ends_with("already here")),
        "{again:#?}"
    );
    // Quiet is quiet there too.
    let command = node.command(&["images", "pull", "-q", &image.name])?;
    let (_, screen, _) = tokio::task::spawn_blocking(move || on_a_terminal(command)).await??;
    ensure!(screen.text() == [id], "{:#?}", screen.text());
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_leaves_its_reason_and_no_bar() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let image = serve(&server, "fails", &[layer(52, 1 << 20)]);
    server.fault(&image.blobs[0].0, Fault::Corrupt, 9);
    let command = node.command(&["images", "pull", &image.name])?;
    let (_, screen, success) = tokio::task::spawn_blocking(move || on_a_terminal(command)).await??;
    let end = screen.text();
    ensure!(!success && !screen.hidden, "{end:#?}");
    ensure!(
        end[0].starts_with("pulling ") && end[1].starts_with("reconcile: "),
        "{end:#?}"
    );
    ensure!(
        !end.iter().any(|line| line.contains('█') || line.contains('░')),
        "{end:#?}"
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn elsewhere_there_are_plain_lines() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let image = serve(&server, "lines", &[layer(53, 64 << 10), layer(54, 1 << 20)]);
    server.fault(
        &image.blobs[1].0,
        Fault::Trickle(64 << 10, Duration::from_millis(40)),
        1,
    );
    let mut command = node.command(&["images", "pull", &image.name])?;
    let out = tokio::task::spawn_blocking(move || command.stdin(Stdio::null()).output()).await??;
    let said = String::from_utf8(out.stderr.clone())?;
    let lines: Vec<_> = said.lines().collect();
    let told = |what: String| lines.iter().filter(|line| **line == what).count();
    for n in 0..2 {
        ensure!(told(format!("{}: fetched", hex(&image, n))) == 1, "{}", shown(&out));
    }
    let begun = lines
        .iter()
        .position(|line| line.starts_with(&format!("{}: fetching ", hex(&image, 1))));
    let ended = lines
        .iter()
        .position(|line| *line == format!("{}: fetched", hex(&image, 1)));
    ensure!(begun.context("not begun")? < ended.context("not ended")?, "{said}");
    ensure!(!said.contains(['\u{1b}', '\r', '█']), "{said:?}");
    node.finish().await
}
