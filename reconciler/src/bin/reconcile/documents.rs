//! The files that `apply`, `run` and `delete` take: YAML of one or more documents, a directory of such, or `-`.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cri::records::v1;
use state::yaml::{self, Problem, Record};

/// Bytes of one file at most; the parser allows no more either.
const LIMIT: u64 = 4 << 20;

/// Reads every document of the given places, in their order. All mistakes of all files are told at once.
pub fn read(places: &[String]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    let mut problems: Vec<Problem> = Vec::new();
    for place in places {
        for file in files(place)? {
            let (name, text) = content(&file)?;
            match yaml::parse(&text, &name) {
                Ok(documents) => {
                    for document in documents {
                        document
                            .warnings
                            .iter()
                            .for_each(|w| eprintln!("reconcile: warning: {w}"));
                        records.push(document.record);
                    }
                }
                Err(found) => problems.extend(found),
            }
        }
    }
    if !problems.is_empty() {
        let all: Vec<_> = problems.iter().map(Problem::to_string).collect();
        bail!("{}", all.join("\n"));
    }
    if records.is_empty() {
        bail!("{}: holds no document", places.join(", "));
    }
    Ok(records)
}

/// In the form in which they are sent.
pub fn to_send(records: &[Record]) -> Result<Vec<v1::Document>> {
    let document = |record: &Record| {
        Ok(v1::Document {
            kind: record.kind().to_owned(),
            json: record.to_json()?,
        })
    };
    records.iter().map(document).collect()
}

/// A directory stands for its YAML files, in the order of their names.
fn files(place: &str) -> Result<Vec<PathBuf>> {
    let path = Path::new(place);
    if place == "-" || !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).with_context(|| format!("cannot list {place}"))? {
        let file = entry.with_context(|| format!("cannot list {place}"))?.path();
        if file.extension().is_some_and(|e| e == "yaml" || e == "yml") {
            found.push(file);
        }
    }
    found.sort();
    if found.is_empty() {
        bail!("{place}: holds no .yaml file");
    }
    Ok(found)
}

fn content(file: &Path) -> Result<(String, String)> {
    let mut text = String::new();
    let name = if file == Path::new("-") {
        "<stdin>".to_owned()
    } else {
        file.display().to_string()
    };
    let read = match name.as_str() {
        "<stdin>" => std::io::stdin().lock().take(LIMIT + 1).read_to_string(&mut text),
        _ => std::fs::File::open(file).and_then(|f| f.take(LIMIT + 1).read_to_string(&mut text)),
    };
    read.with_context(|| format!("cannot read {name}"))?;
    Ok((name, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME}\nspec: {containers: [{name: a, image: b}]}\n";

    #[test]
    fn a_directory_in_order_and_all_mistakes_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.yaml", "a.yml", "ignored.txt"] {
            std::fs::write(dir.path().join(name), POD.replace("NAME", &name[..1])).unwrap();
        }
        let place = dir.path().display().to_string();
        let names = |records: &[Record]| records.iter().map(|r| r.meta().name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&read(std::slice::from_ref(&place)).unwrap()), ["a", "b"]);
        for name in ["b.yaml", "a.yml"] {
            std::fs::write(dir.path().join(name), POD.replace("image", "imagee")).unwrap();
        }
        let error = read(&[place]).unwrap_err().to_string();
        assert!(
            error.contains("a.yml:4:") && error.contains("b.yaml:4:") && error.contains('^'),
            "{error}"
        );
    }

    #[test]
    fn nothing_to_do_is_a_mistake() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("empty.yaml");
        std::fs::write(&file, "# nothing\n").unwrap();
        assert!(read(&[file.display().to_string()]).is_err());
        assert!(read(&[dir.path().join("absent.yaml").display().to_string()]).is_err());
    }
}
