//! Bytes, counts and times as people read them.

/// Sizes beyond this are surely a mistake: 1 TiB, several times the memory of any GPU.
const MOST_BYTES: u64 = 1 << 40;

const UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// What is wrong with a number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum BytesError {
    #[error("a number of bytes is expected, like 85899345920 or 80GiB")]
    Form,
    #[error("0 bytes are no memory")]
    Zero,
    #[error("more than 1 TiB is absurd")]
    TooMany,
}

/// Reads a number of bytes, with or without a unit.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, BytesError> {
    let unit = UNITS.iter().find_map(|(name, scale)| Some((text.strip_suffix(name)?, *scale)));
    let (digits, scale) = unit.unwrap_or((text, 1));
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(BytesError::Form);
    }
    let bytes = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(scale)).ok_or(BytesError::TooMany)?;
    match bytes {
        0 => Err(BytesError::Zero),
        bytes if bytes > MOST_BYTES => Err(BytesError::TooMany),
        bytes => Ok(bytes),
    }
}

/// Bytes with a unit: three digits that tell, or whole numbers below 1 KiB.
pub(crate) fn bytes(n: u64) -> String {
    match UNITS.iter().rev().find(|(_, scale)| n >= *scale) {
        None => format!("{n} B"),
        Some((unit, scale)) => {
            let value = n as f64 / *scale as f64;
            let decimals = if value >= 100.0 { 1 } else { 2 };
            format!("{value:.decimals$} {unit}")
        }
    }
}

/// By how much `there` is less than `asked`, where that is so little that rounding may hide it; else nothing.
pub(crate) fn shortfall(asked: u64, there: u64) -> String {
    match asked.checked_sub(there) {
        Some(short) if short > 0 && short <= asked / 100 => format!(" ({} less)", bytes(short)),
        _ => String::new(),
    }
}

/// A difference of bytes with its sign.
pub(crate) fn signed_bytes(n: i64) -> String {
    match n {
        0 => "0 B".to_owned(),
        n if n > 0 => format!("+{}", bytes(n.unsigned_abs())),
        n => format!("-{}", bytes(n.unsigned_abs())),
    }
}

/// A count with its digits in groups of three.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A share in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// By how much `now` is more or less than `before`, in percent; nothing where there was nothing.
pub(crate) fn change(before: u64, now: u64) -> String {
    if before == 0 {
        return String::new();
    }
    format!("{:+.1} %", (now as f64 / before as f64 - 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_with_and_without_a_unit() {
        assert_eq!(parse_bytes("150109880320"), Ok(150_109_880_320));
        assert_eq!(parse_bytes("40GiB"), Ok(40 << 30));
        assert_eq!(parse_bytes("1TiB"), Ok(1 << 40));
        for (text, error) in [
            ("", BytesError::Form),
            ("GiB", BytesError::Form),
            ("-1", BytesError::Form),
            ("+5", BytesError::Form),
            ("1.5GiB", BytesError::Form),
            ("40GB", BytesError::Form),
            ("0", BytesError::Zero),
            ("2TiB", BytesError::TooMany),
            ("99999999999999999999", BytesError::TooMany),
            ("18446744073709551615GiB", BytesError::TooMany),
        ] {
            assert_eq!(parse_bytes(text), Err(error), "{text}");
        }
    }

    #[test]
    fn figures_are_short_and_have_a_unit() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(150_109_880_320), "139.8 GiB");
        assert_eq!(signed_bytes(-(3 << 20)), "-3.00 MiB");
        assert_eq!(shortfall(1 << 30, (1 << 30) - 512), " (512 B less)");
        assert_eq!(shortfall(70 << 30, (70 << 30) - (1 << 20)), " (1.00 MiB less)", "both are 70.00 GiB");
        assert_eq!((shortfall(2 << 30, 1 << 30), shortfall(1, 1), shortfall(1, 2)), Default::default());
        assert_eq!((count(7), count(1000), count(1_234_567)), ("7".into(), "1,000".into(), "1,234,567".into()));
        assert_eq!(percent(0.861), "86.1 %");
        assert_eq!((change(200, 190), change(0, 5)), ("-5.0 %".into(), String::new()));
    }
}
