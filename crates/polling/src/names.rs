//! Help for who misspelled a name.

/// `, did you mean 'NAME'?` with the name most like `text`, or nothing if it is like none of them.
pub(crate) fn did_you_mean(text: &str, names: &[&str]) -> String {
    const ALIKE: f64 = 0.75;
    let likeness = |name: &&str| strsim::jaro_winkler(text, name);
    match names.iter().copied().max_by(|a, b| likeness(a).total_cmp(&likeness(b))) {
        Some(name) if likeness(&name) > ALIKE => format!(", did you mean '{name}'?"),
        _ => String::new(),
    }
}
