//! Pages of `docs/` that hold what a table says; `EGRET_BLESS=1 cargo test -p egret-daemon` writes them anew.

/// Checks that `docs/PAGE` holds `text`, and nothing else, between `mark` and the end that follows it.
pub(crate) fn hold(page: &str, mark: &str, text: &str) {
    let path = format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/{}"), page);
    let docs = std::fs::read_to_string(&path).expect("the page");
    let begin = format!("<!-- {mark} -->\n\n");
    let start = docs.find(&begin).expect("the mark") + begin.len();
    let end = docs[start..].find("\n<!-- end -->").expect("the end") + start;
    let blessed = format!("{}{text}{}", &docs[..start], &docs[end..]);
    if std::env::var_os("EGRET_BLESS").is_some() {
        std::fs::write(path, &blessed).expect("the page");
        return;
    }
    assert!(docs == blessed, "docs/{page} is out of step; EGRET_BLESS=1 cargo test -p egret-daemon writes it anew");
}
