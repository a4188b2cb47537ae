//! Who a container runs as: names looked up in the image's own /etc/passwd and /etc/group.
//!
//! The image is hostile: its files are opened as if its root were `/`, only when regular, and read up to a bound. A
//! FIFO, a device, a link to the host's files or an endless file gets a clear error or counts as absent.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::fstat;
use state::sandbox::GroupsPolicy;

use super::content::{Error, Result};
use super::unpack::confined;
use super::unpack::whiteout::is_whiteout;

/// Largest /etc/passwd or /etc/group, bytes.
const LIMIT: u64 = 1 << 20;

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

/// A line of passwd(5).
#[derive(Clone, Debug)]
struct User {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
}

/// A line of group(5).
#[derive(Clone, Debug)]
struct Group {
    name: String,
    gid: u32,
    members: Vec<String>,
}

/// Resolves `request` in the root file system open at `root` (O_PATH will do): the container's layers, before the
/// caller's mounts. Rules: CRI `run_as_user`, `run_as_group`, `run_as_username`, `supplemental_groups_policy`.
pub fn lookup(root: BorrowedFd<'_>, request: &UserRequest) -> Result<ResolvedUser> {
    let (user, group, field) = wanted(request)?;
    let users = users(root)?;
    let numeric = number(&user);
    let entry = match numeric {
        Some(uid) => users.iter().find(|u| i64::from(u.uid) == uid),
        None => Some(
            users
                .iter()
                .find(|u| u.name == user)
                .ok_or_else(|| Error::invalid(field, format!("user {user:?} is not in the image's /etc/passwd")))?,
        ),
    };
    let uid = match (numeric, entry) {
        (Some(uid), _) => in_range(uid, field)?,
        (None, Some(entry)) => entry.uid,
        (None, None) => 0, // refused above
    };
    let merge = request.groups_policy == GroupsPolicy::Merge;
    let named_group = group.as_deref().is_some_and(|g| number(g).is_none());
    let listed = if merge || named_group {
        groups(root)?
    } else {
        Vec::new()
    };
    let gid = match group.as_deref() {
        None => entry.map_or(0, |e| e.gid),
        Some(text) => match number(text) {
            Some(gid) => in_range(gid, field)?,
            None => {
                let found = listed.iter().find(|g| g.name == text).map(|g| g.gid);
                found
                    .ok_or_else(|| Error::invalid(field, format!("group {text:?} is not in the image's /etc/group")))?
            }
        },
    };
    let mut all = vec![gid];
    for (i, group) in request.supplemental_groups.iter().enumerate() {
        all.push(in_range(*group, &format!("spec.security.supplementalGroups[{i}]"))?);
    }
    if merge && let Some(entry) = entry {
        all.extend(listed.iter().filter(|g| g.members.contains(&entry.name)).map(|g| g.gid));
    }
    all.sort_unstable();
    all.dedup();
    let home = entry.map(|e| e.home.clone()).filter(|h| !h.is_empty());
    Ok(ResolvedUser {
        uid,
        gid,
        groups: all,
        home,
    })
}

/// User and group as text, and the field that asked for the user.
fn wanted(request: &UserRequest) -> Result<(String, Option<String>, &'static str)> {
    let (text, field) = if !request.run_as_username.is_empty() {
        (request.run_as_username.clone(), "spec.security.runAsUsername")
    } else if let Some(uid) = request.run_as_user {
        (
            in_range(uid, "spec.security.runAsUser")?.to_string(),
            "spec.security.runAsUser",
        )
    } else if request.run_as_group.is_some() {
        let problem = "is set without runAsUser or runAsUsername";
        return Err(Error::invalid("spec.security.runAsGroup", problem));
    } else {
        (request.image_user.clone(), "the image's config.User")
    };
    let mut parts = text.splitn(2, ':');
    let user = parts.next().filter(|u| !u.is_empty()).unwrap_or("0").to_string();
    let mut group = parts.next().filter(|g| !g.is_empty()).map(str::to_string);
    if let Some(gid) = request.run_as_group {
        group = Some(in_range(gid, "spec.security.runAsGroup")?.to_string());
    }
    Ok((user, group, field))
}

fn number(text: &str) -> Option<i64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(i64::MAX))
}

fn in_range(id: i64, field: &str) -> Result<u32> {
    let ok = u32::try_from(id).ok().filter(|id| *id <= i32::MAX as u32);
    ok.ok_or_else(|| Error::invalid(field, format!("{id} is not within 0 and {}", i32::MAX)))
}

fn users(root: BorrowedFd<'_>) -> Result<Vec<User>> {
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split(':').collect();
        let (uid, gid) = (fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?);
        let home = fields.get(5).unwrap_or(&"").to_string();
        Some(User {
            name: fields[0].to_string(),
            uid,
            gid,
            home,
        })
    };
    Ok(read(root, "etc/passwd")?.lines().filter_map(parse).collect())
}

fn groups(root: BorrowedFd<'_>) -> Result<Vec<Group>> {
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split(':').collect();
        let gid = fields.get(2)?.parse().ok()?;
        let members = fields
            .get(3)
            .unwrap_or(&"")
            .split(',')
            .map(|m| m.trim().to_string())
            .collect();
        Some(Group {
            name: fields[0].to_string(),
            gid,
            members,
        })
    };
    Ok(read(root, "etc/group")?.lines().filter_map(parse).collect())
}

/// The file's text, empty if there is none.
fn read(root: BorrowedFd<'_>, path: &str) -> Result<String> {
    let failed = |e: Errno| Error::io("open the image's", path)(e);
    // First only looked at: to open a device or a FIFO can block, or do something.
    let found = match confined(root, path.as_bytes(), OFlag::O_PATH, true) {
        Ok(found) => found,
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENAMETOOLONG) => return Ok(String::new()),
        Err(e) => return Err(failed(e)),
    };
    let stat = fstat(&found).map_err(failed)?;
    if is_whiteout(&stat) {
        return Ok(String::new());
    }
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(Error::invalid(format!("the image's /{path}"), "is not a regular file"));
    }
    let file =
        File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(Error::io("open the image's", path))?;
    let mut bytes = Vec::new();
    file.take(LIMIT + 1)
        .read_to_end(&mut bytes)
        .map_err(Error::io("read the image's", path))?;
    if bytes.len() as u64 > LIMIT {
        return Err(Error::TooBig {
            object: format!("the image's /{path}"),
            limit: LIMIT,
        });
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;

    struct Root(tempfile::TempDir);

    impl Root {
        fn new() -> Root {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir(root.path().join("etc")).unwrap();
            Root(root)
        }

        fn usual() -> Root {
            let root = Root::new();
            root.write(
                "passwd",
                "root:x:0:0:root:/root:/bin/sh\nbroken\napp:x:1000:100::/home/app:/bin/sh\nbad:x:y:z::/:/\n",
            );
            root.write(
                "group",
                "root:x:0:\nusers:x:100:\napp:x:1000:\nwheel:x:10:root,app\nextra:x:4242:app\nnone\n",
            );
            root
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.path().join("etc").join(name), text).unwrap();
        }

        fn ask(&self, change: impl FnOnce(&mut UserRequest)) -> Result<ResolvedUser> {
            let mut request = UserRequest::default();
            change(&mut request);
            lookup(File::open(self.0.path()).unwrap().as_fd(), &request)
        }
    }

    fn ids(user: &ResolvedUser) -> (u32, u32, &[u32]) {
        (user.uid, user.gid, &user.groups)
    }

    #[test]
    fn names_numbers_and_groups() {
        let root = Root::usual();
        let default = root.ask(|_| {}).unwrap();
        assert_eq!(ids(&default), (0, 0, &[0, 10][..]));
        assert_eq!(default.home.as_deref(), Some("/root"));
        for user in ["app", "1000"] {
            let app = root.ask(|r| r.image_user = user.into()).unwrap();
            assert_eq!(ids(&app), (1000, 100, &[10, 100, 4242][..]), "{user}");
            assert_eq!(app.home.as_deref(), Some("/home/app"));
        }
        let app = root.ask(|r| r.image_user = "app:wheel".into()).unwrap();
        assert_eq!(ids(&app), (1000, 10, &[10, 4242][..]));
        let unknown = root.ask(|r| r.run_as_user = Some(77)).unwrap();
        assert_eq!(ids(&unknown), (77, 0, &[0][..]));
        assert_eq!(unknown.home, None);
        let both = root
            .ask(|r| (r.run_as_user, r.run_as_group) = (Some(77), Some(78)))
            .unwrap();
        assert_eq!(ids(&both), (77, 78, &[78][..]));
        let strict = root.ask(|r| {
            r.run_as_username = "app".into();
            r.image_user = "root".into();
            r.supplemental_groups = vec![5, 5, 3];
            r.groups_policy = GroupsPolicy::Strict;
        });
        assert_eq!(ids(&strict.unwrap()), (1000, 100, &[3, 5, 100][..]));
        let merged = root.ask(|r| (r.run_as_user, r.supplemental_groups) = (Some(1000), vec![5]));
        assert_eq!(ids(&merged.unwrap()), (1000, 100, &[5, 10, 100, 4242][..]));
    }

    #[test]
    fn refusals_name_the_field() {
        let root = Root::usual();
        let told = |r: Result<ResolvedUser>| r.unwrap_err().to_string();
        let error = told(root.ask(|r| (r.run_as_group, r.image_user) = (Some(5), "app".into())));
        assert!(error.starts_with("spec.security.runAsGroup: "), "{error}");
        let error = told(root.ask(|r| r.run_as_username = "ghost".into()));
        assert!(error.contains("runAsUsername") && error.contains("ghost"), "{error}");
        let error = told(root.ask(|r| r.image_user = "0:ghosts".into()));
        assert!(error.contains("config.User") && error.contains("ghosts"), "{error}");
        for bad in [-1, 1 << 31, i64::MAX] {
            assert!(told(root.ask(|r| r.run_as_user = Some(bad))).contains("runAsUser"));
            assert!(told(root.ask(|r| r.supplemental_groups = vec![1, bad])).contains("supplementalGroups[1]"));
        }
        assert!(told(root.ask(|r| r.image_user = "99999999999999999999".into())).contains("config.User"));
    }

    #[test]
    fn hostile_files() {
        let empty = Root::new();
        assert_eq!(ids(&empty.ask(|r| r.run_as_user = Some(5)).unwrap()), (5, 0, &[0][..]));

        let escape = Root::new();
        symlink("../../../../../../../../etc/passwd", escape.0.path().join("etc/passwd")).unwrap();
        symlink("/proc/self/root/etc/group", escape.0.path().join("etc/group")).unwrap();
        assert!(escape.ask(|r| r.run_as_username = "daemon".into()).is_err());

        let inside = Root::usual();
        fs::rename(inside.0.path().join("etc/passwd"), inside.0.path().join("real")).unwrap();
        symlink("/real", inside.0.path().join("etc/passwd")).unwrap();
        assert_eq!(inside.ask(|r| r.run_as_username = "app".into()).unwrap().uid, 1000);

        let hang = Root::new();
        nix::unistd::mkfifo(&hang.0.path().join("etc/passwd"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(hang.ask(|_| {}).unwrap_err().to_string().contains("not a regular file"));

        let endless = Root::new();
        File::create(endless.0.path().join("etc/passwd"))
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert!(matches!(endless.ask(|_| {}), Err(Error::TooBig { .. })));
    }
}
