//! `egret config`: looks at configuration files, and serves nothing.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Subcommand};
use egret_vocabulary::config::ConfigFile;

/// What `egret config` is asked.
#[derive(Args, Debug)]
pub struct ConfigArguments {
    #[command(subcommand)]
    question: Question,
}

#[derive(Subcommand, Debug)]
enum Question {
    /// Check whether `egret serve --config FILE` would accept a file, without touching a disk
    Check {
        /// The file
        file: PathBuf,
    },
}

/// Runs `egret config`.
pub fn run(arguments: &ConfigArguments) -> Result<()> {
    let Question::Check { file } = &arguments.question;
    crate::print(&check(file)?)
}

fn check(path: &Path) -> Result<String> {
    let file = ConfigFile::open(path)?;
    let config = file.config()?;
    config.check_nbd_server().map_err(|error| file.locate(&error))?;
    let metrics = file.metrics.iter().map(|address| ("metrics".to_owned(), address));
    config.check_sockets(metrics).map_err(|error| file.locate(&error))?;
    let mut warnings = config.warnings();
    if config.exports.is_empty() {
        warnings.push("nothing to serve: give an --export or a --monitor beside it".to_owned());
    }
    let warnings: String = warnings.iter().map(|warning| format!("warning: {warning}\n")).collect();
    Ok(format!(
        "{warnings}{}: good: iothreads {}, blockdevs {}, exports {}\n",
        path.display(),
        config.iothreads.len(),
        config.blockdevs.len(),
        config.exports.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_counts_objects_or_says_file_line_and_key() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("egret.toml");
        std::fs::write(&file, "[[blockdev]]\nnode-name = 'n'\ndriver = 'null-co'\n").unwrap();
        let good = check(&file).unwrap();
        assert!(good.ends_with("egret.toml: good: iothreads 0, blockdevs 1, exports 0\n"), "{good}");
        assert!(good.starts_with("warning: nothing to serve: give an --export or a --monitor beside it\n"), "{good}");
        std::fs::write(
            &file,
            "[[blockdev]]\nnode-name = 'n'\ndriver = 'null-co'\n\n[[export]]\nid = 'e'\nnode-name = 'n'\ntype = 'nbd'\n",
        )
        .unwrap();
        let error = check(&file).unwrap_err().to_string();
        assert!(error.contains("egret.toml:8: export 'e': type=nbd needs --nbd-server"), "{error}");
        std::fs::write(
            &file,
            "[[blockdev]]\nnode-name = 'n'\ndriver = 'null-co'\n\n[[export]]\nid = 'e'\nnode-name = 'n'\n\
             type = 'vhost-user-blk'\naddr = { type = 'unix', path = '/s' }\n\n[metrics]\npath = '/s'\n",
        )
        .unwrap();
        let error = check(&file).unwrap_err().to_string();
        assert!(error.ends_with("egret.toml:11: metrics: path /s is taken by export 'e'"), "{error}");
        std::fs::write(&file, "[[blockdev]]\nnode-name = 'n'\ndriver = 'null-oc'\n").unwrap();
        let error = check(&file).unwrap_err().to_string();
        assert!(error.ends_with(
            "egret.toml:3: blockdev 'n': driver must be file, host_device, null-co, null-aio, nbd, rbd, raw, throttle or \
             blkdebug, got 'null-oc'"
        ));
    }
}
