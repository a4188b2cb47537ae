//! Docker's credential helpers: `docker-credential-NAME get`, the server on standard input, JSON on standard output.

use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use super::CredentialKind;

/// A helper may ask a server of its own.
const TIME: Duration = Duration::from_secs(15);
/// Bytes of its answer.
const LIMIT: u64 = 1 << 20;
/// As which user a helper hands out an identity token.
const TOKEN_USER: &str = "<token>";

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "Username", default)]
    username: String,
    #[serde(rename = "Secret", default)]
    secret: String,
}

/// What the program knows of a server; `None`: nothing. Errors never quote its output.
pub async fn get(program: &str, server: &str) -> Result<Option<CredentialKind>, String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !program.chars().all(fine) {
        return Err("no name of a program".into());
    }
    let run = run(program, server);
    let (success, output) = match tokio::time::timeout(TIME, run).await {
        Ok(ran) => ran.map_err(|e| e.to_string())?,
        Err(_) => return Err(format!("no answer within {} s", TIME.as_secs())),
    };
    if !success {
        // The one failure that is none, in the protocol's words.
        let nothing = String::from_utf8_lossy(&output).to_lowercase();
        return if nothing.contains("credentials not found") || nothing.contains("no credentials") {
            Ok(None)
        } else {
            Err("it failed".into())
        };
    }
    let answer: Answer =
        serde_json::from_slice(&output).map_err(|_| "its answer is not the JSON of a helper".to_owned())?;
    if answer.secret.is_empty() {
        return Ok(None);
    }
    Ok(Some(if answer.username == TOKEN_USER {
        CredentialKind::IdentityToken(answer.secret)
    } else {
        CredentialKind::Basic {
            username: answer.username,
            password: answer.secret,
        }
    }))
}

async fn run(program: &str, server: &str) -> std::io::Result<(bool, Vec<u8>)> {
    let mut child = Command::new(format!("docker-credential-{program}"))
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that does not read will say so in its answer.
        let _ = stdin.write_all(format!("{server}\n").as_bytes()).await;
    }
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(LIMIT).read_to_end(&mut output).await?;
    }
    let status = child.wait().await?;
    Ok((status.success(), output))
}
