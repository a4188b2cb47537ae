//! Is anything coming? Counts bytes against time spent waiting for the other side; time that our own side takes (a slow
//! disk) does not count.

use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, timeout};

/// Fewer bytes came within the window than the floor allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSlow;

#[derive(Clone, Debug)]
pub struct Meter {
    /// Bytes that a window must bring.
    least: u64,
    window: Duration,
    waited: Duration,
    got: u64,
}

impl Meter {
    /// `floor` in bytes/s.
    pub fn new(floor: u64, window: Duration) -> Meter {
        let least = u128::from(floor) * window.as_millis() / 1000;
        Meter {
            least: u64::try_from(least).unwrap_or(u64::MAX).max(1),
            window,
            waited: Duration::ZERO,
            got: 0,
        }
    }

    /// Waits for what the other side sends next.
    pub async fn wait<T>(&mut self, next: impl Future<Output = T>) -> Result<T, TooSlow> {
        let mut next = pin!(next);
        loop {
            let began = Instant::now();
            let left = self.window.saturating_sub(self.waited);
            let came = timeout(left, next.as_mut()).await;
            self.waited += began.elapsed();
            if self.waited >= self.window {
                self.turn()?;
            }
            if let Ok(value) = came {
                return Ok(value);
            }
        }
    }

    pub fn count(&mut self, bytes: u64) {
        self.got += bytes;
    }

    fn turn(&mut self) -> Result<(), TooSlow> {
        let enough = self.got >= self.least;
        self.waited = Duration::ZERO;
        self.got = 0;
        if enough { Ok(()) } else { Err(TooSlow) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use tokio::time::sleep;

    // Real time, but little of it.
    const WINDOW: Duration = Duration::from_millis(100);

    #[tokio::test]
    async fn silence_and_trickle_fail_and_a_stream_does_not() {
        let mut meter = Meter::new(1000, WINDOW);
        let began = Instant::now();
        assert_eq!(meter.wait(pending::<()>()).await, Err(TooSlow));
        assert!(began.elapsed() < WINDOW * 3);

        let mut meter = Meter::new(1000, WINDOW);
        let trickle = async {
            loop {
                meter.wait(sleep(Duration::from_millis(10))).await?;
                meter.count(1);
            }
        };
        let end: Result<(), TooSlow> = timeout(WINDOW * 10, trickle).await.unwrap();
        assert_eq!(end, Err(TooSlow));

        let mut meter = Meter::new(1000, WINDOW);
        for _ in 0..30 {
            meter.wait(sleep(Duration::from_millis(10))).await.unwrap();
            meter.count(100);
        }
    }

    #[tokio::test]
    async fn our_own_time_does_not_count() {
        let mut meter = Meter::new(1000, WINDOW);
        for _ in 0..5 {
            meter.wait(ready(())).await.unwrap();
            sleep(WINDOW).await;
        }
        assert!(meter.waited < WINDOW);
    }
}
