//! Loads that check what they have written.

use egret_lab::results::Outcome;

use super::{Lab, measured, text};

/// One repetition of a load on Egret with a file, and on Egret with a disk that keeps nothing.
fn plan(rw: &str) -> String {
    let egret = env!("CARGO_BIN_EXE_egret");
    format!(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n\
         [[subject]]\nname = 'keeps'\nstack = 'egret'\n\
         [[subject]]\nname = 'loses'\nstack = 'vhost-user-blk'\n\
         command = '{egret} serve --blockdev null-co,node-name=d0,size=16M,read-zeroes=on \
         --export vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={{socket}},writable=on,num-queues=2'\n\
         [[load]]\nrw = '{rw}'\niodepth = 4\nnumjobs = 2\nsize = '8M'\nverify = true\nramp_time = '20ms'\n\
         runtime = '100ms'\n"
    )
}

#[test]
fn a_server_that_loses_writes_fails_the_cells_that_verify() {
    for rw in ["randwrite", "write", "randrw"] {
        let lab = Lab::new(&plan(rw));
        let output = lab.bench(&[]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        for cell in lab.run().cells {
            match &cell.outcome {
                Outcome::Failed { reason, .. } => {
                    assert!(cell.id.subject == "loses" && reason.ends_with("is no stamped block"), "{cell:?}");
                }
                _ => assert!(cell.id.subject == "keeps" && measured(&cell).writes.is_some(), "{cell:?}"),
            }
            if let (Outcome::Measured(measured), "randwrite" | "write") = (&cell.outcome, rw) {
                assert_eq!(measured.reads, None, "what is read back is none of the load's");
            }
        }
    }
}
