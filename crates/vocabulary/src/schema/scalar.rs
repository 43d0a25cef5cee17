//! Bools, numbers, sizes and names in text, spelled as QEMU spells them.

/// `on`, `yes`, `true`, `y` and their opposites.
pub(super) fn parse_flag(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// A whole number as C reads it: decimal, `0x` hexadecimal, or octal after a leading 0.
pub(super) fn parse_number(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hexadecimal) => (hexadecimal, 16),
        None if text.len() > 1 && text.starts_with('0') => (&text[1..], 8),
        None => (text, 10),
    };
    // `from_str_radix` would take a sign.
    if digits.starts_with('+') { None } else { u64::from_str_radix(digits, radix).ok() }
}

/// Bytes: a decimal number, perhaps with a fraction, and a suffix of `B K M G T P E` in steps of 1024; or `0x...`.
pub(super) fn parse_bytes(text: &str) -> Option<u64> {
    if text.starts_with("0x") || text.starts_with("0X") {
        return parse_number(text);
    }
    let digits = text.trim_end_matches(|last: char| last.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "b" | "B" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return None,
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || fraction.len() > 18 {
        return None;
    }
    let whole = whole.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    // Less than one unit; what is left of a byte is dropped.
    let fraction = (fraction.parse::<u128>().ok()? << shift) / 10_u128.pow(fraction.len() as u32);
    whole.checked_add(u64::try_from(fraction).ok()?)
}

/// A letter, then letters, digits, `-`, `.` and `_`: at most `most` bytes.
pub(super) fn parse_name(text: &str, most: usize) -> Option<&str> {
    let mut characters = text.chars();
    let fits = text.len() <= most
        && characters.next().is_some_and(|first| first.is_ascii_alphabetic())
        && characters.all(|character| character.is_ascii_alphanumeric() || matches!(character, '-' | '.' | '_'));
    fits.then_some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_read_as_c_reads_them() {
        for (text, number) in [
            ("0", Some(0)),
            ("64", Some(64)),
            ("0x10", Some(16)),
            ("010", Some(8)),
            ("08", None),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("", None),
            ("+1", None),
            ("-1", None),
            ("0x", None),
            ("0x+1", None),
            (" 1", None),
            ("1k", None),
            ("1.0", None),
        ] {
            assert_eq!(parse_number(text), number, "{text:?}");
        }
    }

    #[test]
    fn sizes_take_binary_suffixes_and_fractions() {
        for (text, bytes) in [
            ("512", Some(512)),
            ("4k", Some(4096)),
            ("1.5G", Some(3 << 29)),
            ("0.5K", Some(512)),
            ("1B", Some(1)),
            ("15E", Some(15 << 60)),
            ("16E", None),
            ("0x200", Some(512)),
            ("4kb", None),
            ("4 k", None),
            (".5G", None),
            ("1.G", None),
            ("-1", None),
            ("", None),
            ("K", None),
        ] {
            assert_eq!(parse_bytes(text), bytes, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_a_scalar_panic(text in "\\PC*") {
            let _ = (parse_flag(&text), parse_number(&text), parse_bytes(&text), parse_name(&text, 31));
        }

        #[test]
        fn no_near_miss_of_a_size_panics(text in "[0-9.]{0,30}[KMGTPEkxB]?") {
            let _ = (parse_bytes(&text), parse_number(&text));
        }
    }
}
