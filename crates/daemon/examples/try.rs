//! scratch
use egret_daemon::schema::*;
use egret_daemon::*;
fn main() {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut io = vec![]; let mut bd = vec![]; let mut ex = vec![];
    let args: Vec<String> = std::env::args().skip(1).collect();
    for pair in args.chunks(2) {
        match pair[0].as_str() {
            "--object" => { let (mut v, s) = keyval::read(&pair[1], "qom-type").unwrap(); v.as_object_mut().unwrap().remove("qom-type"); io.push(IoThread::from_value(v, s).unwrap()) }
            "--blockdev" => { let (v, s) = keyval::read(&pair[1], "driver").unwrap(); bd.push(Blockdev::from_value(v, s).unwrap()) }
            "--export" => { let (v, s) = keyval::read(&pair[1], "type").unwrap(); ex.push(Export::from_value(v, s).unwrap()) }
            x => panic!("{x}"),
        }
    }
    let signals = process::Signals::block().unwrap();
    let config = Config::new(io, bd, ex).unwrap();
    let daemon = match Daemon::start(&config) { Ok(d) => d, Err(e) => { eprintln!("{e}"); std::process::exit(1) } };
    signals.wait().unwrap();
    eprintln!("{:?}", daemon.loop_stats());
    let s = daemon.queue_stats();
    eprintln!("{:?} p50 {:?} calls {}", s.total(), s.latency().map(|h| h.value_at_quantile(0.5)), s.calls);
    drop(daemon);
}
