//! `egret-faultdisk`: a disk for drills.

#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use anyhow::Context;
use clap::Parser;
use egret_faultdisk::{FaultDisk, serve};

/// A disk that fails as it is told to, and loses what was not flushed when its power goes
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// An empty folder, where the disk will be the file `disk`
    folder: PathBuf,
    /// What is on the disk: a raw image, whose length is the disk's
    #[arg(long, value_name = "FILE")]
    image: PathBuf,
    /// A socket to make, where the disk is told what to do
    #[arg(long, value_name = "SOCKET")]
    control: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let Arguments { folder, image, control } = Arguments::parse();
    let (ended, end) = mpsc::channel();
    let failed = ended.clone();
    ctrlc::set_handler(move || drop(ended.send(Ok(()))))?;
    let file = File::options().read(true).write(true).open(&image);
    let file = file.with_context(|| format!("--image {}", image.display()))?;
    let listener = UnixListener::bind(&control).with_context(|| format!("--control {}", control.display()))?;
    let disk = FaultDisk::mount(file, &folder).with_context(|| format!("mount {}", folder.display()));
    let disk = disk.map(Arc::new).inspect_err(|_| drop(std::fs::remove_file(&control)))?;
    println!("{}", disk.path().display());
    let server = Arc::clone(&disk);
    std::thread::spawn(move || failed.send(serve(&server, &listener)));
    let ended = end.recv().context("nobody is left to end it")?;
    // The serving thread has the disk as well, and stays.
    disk.close();
    std::fs::remove_file(&control).context("--control")?;
    ended.context("--control")
}
