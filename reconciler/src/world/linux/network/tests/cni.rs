//! CNI.

use super::*;
