//! What SECURITY.md promises is held by tests that are there.

use std::path::Path;

/// The text of every Rust file below `folder`.
fn sources(folder: &Path, into: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_test_that_the_security_page_names_is_there() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let page = std::fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let mut code = String::new();
    sources(&root.join("crates"), &mut code);
    // A test's name is a sentence, and options are not.
    let names = page.split('`').skip(1).step_by(2).filter(|name| name.matches('_').count() >= 4);
    let missing: Vec<_> = names.clone().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    assert!(names.count() > 20);
    assert!(missing.is_empty(), "{missing:#?}");
}
