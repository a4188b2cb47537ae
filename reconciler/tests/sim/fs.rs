//! A file system in memory that knows what a power cut would leave.
//!
//! As ext4 does it: names are journalled in order, so a sync of any file makes all names so far durable, but of the
//! bytes only those of that file; a file that was never synced comes back empty.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Dir,
    /// Number of the inode.
    File(u64),
}

#[derive(Clone, Debug, Default)]
struct Inode {
    bytes: Vec<u8>,
    synced: Vec<u8>,
}

/// What a power cut does to names that were not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// All go back to the last sync.
    Names,
    /// They are there; the bytes of files are not.
    Bytes,
}

#[derive(Clone, Debug)]
pub struct Fs {
    names: BTreeMap<PathBuf, Node>,
    /// As the disk has them.
    durable: BTreeMap<PathBuf, Node>,
    inodes: BTreeMap<u64, Inode>,
    last: u64,
    /// Lives in memory only.
    tmpfs: PathBuf,
}

impl Fs {
    pub fn new(tmpfs: &Path) -> Fs {
        Fs {
            names: BTreeMap::new(),
            durable: BTreeMap::new(),
            inodes: BTreeMap::new(),
            last: 0,
            tmpfs: tmpfs.to_owned(),
        }
    }

    pub fn read(&self, path: &Path) -> Option<&[u8]> {
        match self.names.get(path)? {
            Node::File(inode) => Some(&self.inodes.get(inode)?.bytes),
            Node::Dir => None,
        }
    }

    pub fn exists(&self, path: &Path) -> bool {
        self.names.contains_key(path)
    }

    /// Number of the file of that name.
    pub fn inode(&self, path: &Path) -> Option<u64> {
        match self.names.get(path)? {
            Node::File(inode) => Some(*inode),
            Node::Dir => None,
        }
    }

    /// Opens a file for appending, made if its directory is there.
    pub fn open(&mut self, path: &Path) -> Option<u64> {
        let made = self.inode(path).is_some() || self.write(path, b"");
        made.then(|| self.inode(path)).flatten()
    }

    pub fn is_dir(&self, path: &Path) -> bool {
        self.names.get(path) == Some(&Node::Dir)
    }

    pub fn make_dir(&mut self, path: &Path) {
        for dir in path.ancestors() {
            self.names.entry(dir.to_owned()).or_insert(Node::Dir);
        }
    }

    /// Writes a new file, or anew; false if its directory is not there.
    pub fn write(&mut self, path: &Path, bytes: &[u8]) -> bool {
        if !path.parent().is_some_and(|dir| self.is_dir(dir)) {
            return false;
        }
        let inode = match self.names.get(path) {
            Some(Node::File(inode)) => *inode,
            _ => {
                self.last += 1;
                self.names.insert(path.to_owned(), Node::File(self.last));
                self.last
            }
        };
        self.inodes.entry(inode).or_default().bytes = bytes.to_vec();
        true
    }

    /// Makes a file's bytes, and all names, durable.
    pub fn sync(&mut self, path: &Path) {
        self.durable.clone_from(&self.names);
        if let Some(Node::File(inode)) = self.names.get(path)
            && let Some(inode) = self.inodes.get_mut(inode)
        {
            inode.synced.clone_from(&inode.bytes);
        }
    }

    pub fn unlink(&mut self, path: &Path) {
        if let Some(Node::File(_)) = self.names.get(path) {
            self.names.remove(path);
        }
    }

    /// False if it is not empty.
    pub fn remove_dir(&mut self, path: &Path) -> bool {
        if !self.children(path).is_empty() {
            return false;
        }
        self.names.remove(path);
        true
    }

    /// Renames a file, or a directory with all below it.
    pub fn rename(&mut self, from: &Path, to: &Path) {
        let moved: Vec<(PathBuf, Node)> = self.below(from);
        for (path, node) in moved {
            self.names.remove(&path);
            let rest = path.strip_prefix(from).expect("it is below");
            let to = if rest.as_os_str().is_empty() {
                to.to_owned()
            } else {
                to.join(rest)
            };
            self.names.insert(to, node);
        }
    }

    pub fn remove_tree(&mut self, path: &Path) {
        for (path, _) in self.below(path) {
            self.names.remove(&path);
        }
    }

    fn below(&self, path: &Path) -> Vec<(PathBuf, Node)> {
        let all = self
            .names
            .range(path.to_owned()..)
            .take_while(|(p, _)| p.starts_with(path));
        all.map(|(path, node)| (path.clone(), node.clone())).collect()
    }

    /// Names of the children, and whether they are directories.
    pub fn children(&self, dir: &Path) -> Vec<(String, bool)> {
        let below = self
            .names
            .range(dir.to_owned()..)
            .take_while(|(p, _)| p.starts_with(dir));
        let own = below.filter(|(path, _)| path.parent() == Some(dir));
        own.map(|(path, node)| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, *node == Node::Dir)
        })
        .collect()
    }

    /// Every path, for a census.
    pub fn all(&self) -> Vec<PathBuf> {
        self.names.keys().cloned().collect()
    }

    pub fn power_cut(&mut self, loss: Loss) {
        if loss == Loss::Bytes {
            self.durable.clone_from(&self.names);
        }
        let tmpfs = self.tmpfs.clone();
        self.durable.retain(|path, _| !path.starts_with(&tmpfs));
        self.names.clone_from(&self.durable);
        for inode in self.inodes.values_mut() {
            inode.bytes.clone_from(&inode.synced);
        }
    }
}

/// The rules themselves, since all else stands on them.
#[test]
fn a_power_cut_leaves_what_was_synced() {
    let mut fs = Fs::new(Path::new("/run"));
    fs.make_dir(Path::new("/d"));
    fs.make_dir(Path::new("/run/x"));
    let (a, b, c) = (Path::new("/d/a"), Path::new("/d/b"), Path::new("/d/c"));
    assert!(fs.write(a, b"a") && fs.write(b, b"b"));
    fs.sync(a);
    assert!(fs.write(c, b"c"));
    assert!(!fs.write(Path::new("/no/dir"), b""));
    let mut bytes = fs.clone();
    fs.power_cut(Loss::Names);
    assert_eq!(
        (fs.read(a), fs.read(b), fs.read(c)),
        (Some(&b"a"[..]), Some(&b""[..]), None)
    );
    assert!(!fs.exists(Path::new("/run/x")));
    bytes.power_cut(Loss::Bytes);
    assert_eq!(bytes.read(c), Some(&b""[..]));
}
