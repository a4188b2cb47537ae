//! `reconcile-shim`: owns a pod's processes. See the library's page for the picture.
//!
//! ```text
//! reconcile-shim serve --namespace NS --pod POD --id UID --dir DIR [--cgroup PATH] [--oom-score N]
//! reconcile-shim hold user [net] [ipc] [uts]      makes namespaces and stands in them until stdin ends
//! reconcile-shim hello [WORDS]      the built-in test image's program, also as a file named `hello`
//! ```

/// Says something in the shim's log (stderr), up to a bound.
macro_rules! note {
    ($($arg:tt)*) => { $crate::serve::note(format_args!($($arg)*)) };
}
use note;

mod adopt;
mod attach;
mod r#become;
mod cgroup;
mod hello;
mod holder;
mod init;
mod inside;
mod join;
mod log;
mod mounts;
mod pause;
mod process;
mod runtime;
mod serve;
mod service;
mod session;
mod stdio;
mod sys;

fn main() {
    let args: Vec<String> = std::env::args_os()
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect();
    let name = args
        .first()
        .and_then(|name| name.rsplit('/').next())
        .unwrap_or_default();
    let code = match args.get(1).map(String::as_str) {
        _ if name == "hello" => hello::run(&args[1..]),
        Some("hello") => hello::run(&args[2..]),
        Some("hold") => holder::run(&args[2..]),
        Some("serve") => serve::run(&args[2..]),
        Some("--version") => {
            println!("reconcile-shim {}", env!("CARGO_PKG_VERSION"));
            0
        }
        _ => {
            eprintln!(
                "usage: reconcile-shim serve --namespace NS --pod POD --id UID --dir DIR [--cgroup PATH] \
                 [--oom-score N]"
            );
            2
        }
    };
    std::process::exit(code);
}
