//! Two minutes of chaos with a fixed seed, and two with a fresh one. What happened is printed.

use std::time::Duration;

use anyhow::Result;
use e2e::chaos::{Options, run};

async fn chaos(seed: u64) -> Result<()> {
    let seconds = std::env::var("E2E_CHAOS_SECONDS").map_or(Ok(120), |text| text.parse())?;
    let time = Duration::from_secs(seconds);
    println!("chaos, seed {seed}: {}", run(Options { seed, time }).await?);
    Ok(())
}

#[tokio::test]
async fn nothing_is_lost_or_left_with_the_fixed_seed() -> Result<()> {
    chaos(7).await
}

#[tokio::test]
async fn nothing_is_lost_or_left_with_a_fresh_seed() -> Result<()> {
    chaos(fastrand::u64(..)).await
}
