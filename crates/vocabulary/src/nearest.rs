//! The known name that is nearest to an unknown one: "did you mean".

/// The candidate nearest to `given`, if its name, or the last part of its name, is a few typing errors away.
pub fn nearest<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let errors = |candidate: &str| {
        let last = candidate.rsplit('.').next().unwrap_or(candidate);
        strsim::osa_distance(given, candidate).min(strsim::osa_distance(given, last))
    };
    let (distance, candidate) = candidates.into_iter().map(|name| (errors(name), name)).min_by_key(|near| near.0)?;
    let length = given.chars().count();
    // A name of one letter with one error has nothing in common with any other.
    (distance <= (length / 3).max(1) && distance < length.max(1)).then_some(candidate)
}

/// `did you mean 'x'?`, or else `known are a, b`.
pub fn hint<'a>(given: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    match nearest(given, known.clone()) {
        Some(near) => format!("did you mean '{near}'?"),
        None => match known.into_iter().collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => "there are none".to_owned(),
            all => format!("known are {all}"),
        },
    }
}

/// `, did you mean 'x'?`, or nothing: for who has listed all names.
pub fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(given, known).map_or_else(String::new, |near| format!(", did you mean '{near}'?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_a_few_typing_errors_away_or_the_end_of_a_longer_one() {
        let keys = ["poll-weight", "poll-max-ns", "cache.direct"];
        assert_eq!(nearest("poll-wieght", keys), Some("poll-weight"));
        assert_eq!(nearest("direct", keys), Some("cache.direct"));
        assert_eq!(nearest("colour", keys), None);
        assert_eq!(nearest("x", []), None);
        assert_eq!(nearest("x", ["y"]), None);
    }
}
