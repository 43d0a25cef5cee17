//! A disk over one connection, which is there: for the fuzzer, too.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use egret_disk::{BlockLimits, Blocks, Engine, EngineError, FlushError, OpenCause, Remote, RemoteKind, Shape};
use egret_nbd::handshake::Export;

/// The disk.
#[derive(Debug)]
pub(crate) struct Connected {
    export: Export,
    socket: Mutex<Option<OwnedFd>>,
}

impl Connected {
    /// Of one engine, with `socket` as its connection.
    pub(crate) fn new(export: Export, socket: OwnedFd) -> Self {
        Self { export, socket: Mutex::new(Some(socket)) }
    }
}

impl Remote for Connected {
    fn kind(&self) -> RemoteKind {
        RemoteKind::Nbd
    }

    fn name(&self) -> &str {
        "d0"
    }

    fn open(&self) -> Result<Shape, OpenCause> {
        let blocks = Blocks { logical: 512, physical: 4096 };
        Ok(Shape { size: self.export.size, blocks, limits: BlockLimits::unlimited(512) })
    }

    fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
        let socket = self.socket.lock().ok().and_then(|mut socket| socket.take()).expect("there is one engine");
        egret_nbd::engine_over(socket, self.export)
    }

    fn ask_size(&self) -> io::Result<u64> {
        Ok(self.export.size)
    }

    fn flush(&self) -> Result<(), FlushError> {
        Ok(())
    }
}
