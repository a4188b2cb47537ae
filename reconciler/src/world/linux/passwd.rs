//! Who a container runs as: names looked up in the image's own /etc/passwd and /etc/group.

use std::os::fd::BorrowedFd;

use state::sandbox::GroupsPolicy;

use super::content::Result;

/// What a caller and an image ask for (CRI `LinuxContainerSecurityContext`, OCI config `User`).
#[derive(Clone, Debug, Default)]
pub struct UserRequest {
    pub run_as_username: String,
    pub run_as_user: Option<i64>,
    pub run_as_group: Option<i64>,
    /// `user[:group]`, names or numbers.
    pub image_user: String,
    pub supplemental_groups: Vec<i64>,
    pub groups_policy: GroupsPolicy,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedUser {
    pub uid: u32,
    pub gid: u32,
    /// With `gid`; sorted, unique.
    pub groups: Vec<u32>,
    /// From the user's passwd entry.
    pub home: Option<String>,
}

/// Resolves `request` in the root file system open at `root`.
pub fn lookup(root: BorrowedFd<'_>, request: &UserRequest) -> Result<ResolvedUser> {
    let _ = (root, request);
    todo!()
}
