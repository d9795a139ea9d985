use super::*;
use crate::config::{Expected, Place, Rounding, VirtualMemory};

const POLICIES: &[Policy] = Policy::ALL;

fn parse(text: &str) -> Config {
    let config = Config::parse_pytorch(text, Policy::Torch215).unwrap_or_else(|error| panic!("{text}: {error}"));
    config.validate().unwrap();
    config
}

fn refuse(text: &str) -> ConfigError {
    Config::parse_pytorch(text, Policy::Torch215).expect_err(text)
}

const fn at(offset: usize, item: usize) -> Place {
    Place { offset, item }
}

fn bad(option: &'static str, value: &str, place: Place, allowed: Allowed) -> ConfigError {
    ConfigError::BadValue { option, value: value.into(), place, allowed }
}

fn accepted(config: &Config) -> Vec<(&str, &str, AcceptedWhy)> {
    config.accepted().iter().map(|option| (option.name, option.value.as_str(), option.why)).collect()
}

#[test]
fn nothing_leaves_the_defaults() {
    for policy in POLICIES {
        let config = Config::parse_pytorch("", *policy).unwrap();
        assert_eq!(config, Config::new(*policy));
    }
    for blank in [" ", "\t\r\n\x0b\x0c"] {
        let config = parse(blank);
        assert_eq!(config.pytorch_options(), blank);
        assert_eq!(Config { pytorch_options: String::new(), ..config }, Config::new(Policy::Torch215));
    }
}

#[test]
fn every_option_that_applies() {
    let text = "max_split_size_mb:64,max_non_split_rounding_mb:32,garbage_collection_threshold:0.8,\
                roundup_power2_divisions:8,large_segment_size_mb:12,per_process_memory_fraction:0.5,\
                throw_on_cudamalloc_oom:True,graph_capture_record_stream_reuse:True";
    for policy in [Policy::Torch215, Policy::Segments] {
        let config = Config::parse_pytorch(text, policy).unwrap();
        let mut expected = Config::new(policy)
            .with_max_split_size(64 * MIB)
            .with_max_non_split_rounding(32 * MIB)
            .with_garbage_collection_threshold(0.8)
            .with_rounding(Rounding::uniform(8).unwrap())
            .with_large_segment_size(12 * MIB)
            .with_memory_fraction(0.5)
            .with_reject_over_fraction(true)
            .with_capture_reuse(true)
            .build()
            .unwrap();
        expected.pytorch_options = text.into();
        assert_eq!(config, expected);
    }
}

#[test]
fn whitespace_and_a_comma_at_the_end_do_not_matter() {
    let config = parse(" max_split_ size_mb :\t4 0 ,\n garbage_collection_threshold : 0. 5 , ");
    assert_eq!(config.max_split_size(), Some(40 * MIB));
    assert_eq!(config.garbage_collection_threshold(), Some(0.5));
}

#[test]
fn divisions_of_the_golden_lists() {
    let entries = |text: &str| *parse(&format!("roundup_power2_divisions:{text}")).rounding().entries();
    assert_eq!(entries("[1:2,4:8,256:0,>:16]"), [2, 0, 8, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16]);
    assert_eq!(entries("[256:1,512:2,1024:4,>:8]"), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]);
    assert_eq!(entries("[ 64 : 8 , 256 : 4 , ]"), [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(entries("4"), [4; 16]);
    assert_eq!(entries("1"), [1; 16]);
    assert_eq!(entries("[]"), [0; 16]);
    // Keys above the last entry are the last entry, which leaves `>` nothing.
    assert_eq!(entries("[131072:2,>:4]"), [2; 16]);
    assert_eq!(entries("[9223372036854775808:2]"), [2; 16]);
    // `>` counts from the key before it, which need not be the last; with none before it, from entry 0.
    assert_eq!(entries("[>:4]"), [4; 16]);
    assert_eq!(entries("[2:1,>:4,1:2]"), [2, 1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]);
    // Only the first key fills what lies below it.
    assert_eq!(entries("[1:2,8:4]"), [2, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(entries("[1:2147483648]")[0], 1 << 31);
}

#[test]
fn wrong_divisions() {
    let option = "roundup_power2_divisions";
    for (list, part, offset, allowed) in [
        ("0", "0", 25, Allowed::Divisions),
        ("3", "3", 25, Allowed::Divisions),
        ("-4", "-4", 25, Allowed::Divisions),
        ("4294967296", "4294967296", 25, Allowed::Divisions),
        (">", ">", 25, Allowed::Divisions),
        ("[1:3]", "3", 28, Allowed::DivisionsOrZero),
        ("[1:2,>:x]", "x", 32, Allowed::DivisionsOrZero),
        ("[3:2]", "3", 26, Allowed::Interval),
        ("[0:2]", "0", 26, Allowed::Interval),
        ("[1:2,x:2]", "x", 30, Allowed::Interval),
        ("[18446744073709551616:2]", "18446744073709551616", 26, Allowed::Interval),
    ] {
        assert_eq!(refuse(&format!("{option}:{list}")), bad(option, part, at(offset, 1), allowed), "{list}");
    }
}

#[test]
fn large_segment_size_counts_wherever_it_stands() {
    let config = parse("max_split_size_mb:12,large_segment_size_mb:11");
    assert_eq!((config.max_split_size(), config.large_segment_size()), (Some(12 * MIB), 11 * MIB));
    assert_eq!(config.max_non_split_rounding(), 11 * MIB);
    assert_eq!(
        refuse("max_split_size_mb:39,large_segment_size_mb:40"),
        bad("max_split_size_mb", "39", at(18, 1), Allowed::Mebibytes { least: 40 })
    );
    assert_eq!(
        refuse("large_segment_size_mb:40, max_non_split_rounding_mb:39"),
        bad("max_non_split_rounding_mb", "39", at(52, 2), Allowed::Mebibytes { least: 40 })
    );
    let range = Allowed::MebibytesBetween { least: 11, most: 1 << 20 };
    for value in ["10", "0", "1048577", "18446744073709551615", "18446744073709551616", "1e2", "20.0", "x"] {
        let error = refuse(&format!("large_segment_size_mb:{value}"));
        assert_eq!(error, bad("large_segment_size_mb", value, at(22, 1), range));
    }
    assert_eq!(parse("large_segment_size_mb:1048576").large_segment_size(), 1 << 40);
}

#[test]
fn sizes() {
    for option in ["max_split_size_mb", "max_non_split_rounding_mb"] {
        for value in ["19", "0", "-1", "40MB", "4G", "0x40", "4294967296000000000000000", "", "[20:20]"] {
            let text = format!("{option}:{value}");
            assert!(refuse(&text).to_string().contains(option) || value.is_empty(), "{text}");
        }
    }
    assert_eq!(parse("max_split_size_mb:20").max_split_size(), Some(20 * MIB));
    assert_eq!(parse("max_split_size_mb:+20").max_split_size(), Some(20 * MIB));
    let most = u64::MAX / MIB * MIB;
    assert_eq!(parse("max_split_size_mb:18446744073709551615").max_split_size(), Some(most));
    assert_eq!(parse("max_non_split_rounding_mb:17592186044416").max_non_split_rounding(), most);
}

#[test]
fn shares() {
    let option = "garbage_collection_threshold";
    for value in ["0", "1", "1.0", "-0.5", "nan", "inf", "0.5f", "50%", "True", "1e999", "1e-999"] {
        let expected = bad(option, value, at(29, 1), Allowed::OpenFraction);
        assert_eq!(refuse(&format!("{option}:{value}")), expected);
    }
    for (value, share) in [("0.5", 0.5), (".5", 0.5), ("5e-1", 0.5), ("0.999999", 0.999_999)] {
        assert_eq!(parse(&format!("{option}:{value}")).garbage_collection_threshold(), Some(share));
    }
    let option = "per_process_memory_fraction";
    for value in ["-0.1", "1.1", "nan", "inf", "half"] {
        assert_eq!(refuse(&format!("{option}:{value}")), bad(option, value, at(28, 1), Allowed::Fraction));
    }
    for (value, share) in [("0", 0.0), ("0.25", 0.25), ("1", 1.0), ("1.0", 1.0)] {
        assert_eq!(parse(&format!("{option}:{value}")).memory_fraction(), share);
    }
}

#[test]
fn booleans_are_spelled_exactly() {
    for option in ["throw_on_cudamalloc_oom", "graph_capture_record_stream_reuse", "expandable_segments"] {
        for value in ["true", "TRUE", "1", "0", "yes", "Truе"] {
            let expected = bad(option, value, at(option.len() + 1, 1), Allowed::Boolean);
            assert_eq!(refuse(&format!("{option}:{value}")), expected);
        }
    }
    assert!(!parse("throw_on_cudamalloc_oom:False").reject_over_fraction());
    let own = Config::parse_pytorch("graph_capture_record_stream_reuse:False", Policy::Segments).unwrap();
    assert!(!own.capture_reuse());
}

#[test]
fn what_has_no_effect_is_listed() {
    use AcceptedWhy::{AlreadySo, HostMemory, NeedsExpandableSegments, NoLockHeld};
    let config = parse(
        "backend:native,expandable_segments:False,expandable_segments_reserve:40G,\
         expandable_segments_reserve_by_class:[kv: 0.5, other:8G],release_lock_on_hipmalloc:True,\
         pinned_use_cuda_host_register:True,pinned_use_hip_host_register:False,pinned_num_register_threads:128,\
         pinned_use_background_threads:True,pinned_reserve_segment_size_mb:1,pinned_free_catch_all:True,\
         pinned_max_round_threshold_mb:0,pinned_max_cached_size_mb:64",
    );
    assert!(config.release_lock_on_malloc());
    assert_eq!(
        accepted(&config),
        [
            ("backend", "native", AlreadySo),
            ("expandable_segments", "False", AlreadySo),
            ("expandable_segments_reserve", "40G", NeedsExpandableSegments),
            ("expandable_segments_reserve_by_class", "[kv:0.5,other:8G]", NeedsExpandableSegments),
            ("release_lock_on_cudamalloc", "True", NoLockHeld),
            ("pinned_use_cuda_host_register", "True", HostMemory),
            ("pinned_use_cuda_host_register", "False", HostMemory),
            ("pinned_num_register_threads", "128", HostMemory),
            ("pinned_use_background_threads", "True", HostMemory),
            ("pinned_reserve_segment_size_mb", "1", HostMemory),
            ("pinned_free_catch_all", "True", HostMemory),
            ("pinned_max_round_threshold_mb", "0", HostMemory),
            ("pinned_max_cached_size_mb", "64", HostMemory),
        ]
    );
    assert_eq!(config.accepted()[1].place, Some(at(15, 2)));
    let text = config.accepted()[0].to_string();
    assert_eq!(text, "backend:native has no effect: this is how it is anyway");
}

#[test]
fn under_pages_nothing_is_kept_from_being_taken_apart() {
    let config = Config::parse_pytorch("max_split_size_mb:64,max_non_split_rounding_mb:32", Policy::Pages).unwrap();
    let why = AcceptedWhy::PagesMove;
    assert_eq!(accepted(&config), [("max_split_size_mb", "64", why), ("max_non_split_rounding_mb", "32", why)]);
}

#[test]
fn under_pages_addresses_are_reserved_as_needed_and_without_virtual_memory_options_mean_what_they_do_under_segments() {
    let text = "expandable_segments:True,expandable_segments_reserve:40G,max_split_size_mb:64";
    let config = Config::parse_pytorch(text, Policy::Pages).unwrap();
    let said = |whys: &[AcceptedWhy]| accepted(&config).iter().map(|(.., why)| *why).eq(whys.iter().copied());
    assert!(said(&[AcceptedWhy::AlreadySo, AcceptedWhy::AddressesAsNeeded, AcceptedWhy::PagesMove]));
    let off = config.with_virtual_memory(VirtualMemory::Never);
    let why = AcceptedWhy::NoVirtualMemory;
    assert_eq!(accepted(&off), [("expandable_segments", "True", why), ("expandable_segments_reserve", "40G", why)]);
    // It has its effect.
    assert_eq!(off.max_split_size(), Some(64 * MIB));
}

#[test]
fn what_has_no_effect_is_checked_all_the_same() {
    for text in [
        "pinned_num_register_threads:3",
        "pinned_num_register_threads:256",
        "pinned_num_register_threads:0",
        "pinned_reserve_segment_size_mb:0",
        "pinned_use_background_threads:on",
        "pinned_max_cached_size_mb:-1",
        "release_lock_on_cudamalloc:1",
        "expandable_segments_reserve:[a:1]",
        "expandable_segments_reserve_by_class:0.5",
        "backend:[native:1]",
    ] {
        let name = text.split(':').next().unwrap();
        let error = refuse(text);
        assert!(matches!(error, ConfigError::BadValue { option, .. } if option == name), "{error}");
    }
}

#[test]
fn what_another_policy_takes_the_place_of() {
    for policy in POLICIES {
        for (option, value, superseded_by) in [
            ("expandable_segments", "True", "pages"),
            ("backend", "cudaMallocAsync", "stream-ordered"),
            ("backend", "hipMallocAsync", "stream-ordered"),
        ] {
            let result = Config::parse_pytorch(&format!("{option}:{value}"), *policy);
            if superseded_by == policy.name() {
                assert_eq!(accepted(&result.unwrap()), [(option, value, AcceptedWhy::AlreadySo)]);
                continue;
            }
            let error = result.unwrap_err();
            let place = at(option.len() + 1, 1);
            assert_eq!(error, ConfigError::Superseded { option, value: value.into(), place, superseded_by });
            assert!(error.to_string().contains(&format!("`{superseded_by}`")), "{error}");
        }
    }
    let error = Config::parse_pytorch("backend:native", Policy::StreamOrdered).unwrap_err();
    assert!(error.to_string().contains("`segments`"), "{error}");
    let error = Config::parse_pytorch("expandable_segments:False", Policy::Pages).unwrap_err();
    assert!(error.to_string().contains("`segments`"), "{error}");
    assert_eq!(refuse("backend:cuda"), bad("backend", "cuda", at(8, 1), Allowed::Backend));
}

#[test]
fn the_last_of_several_counts() {
    let config = parse("max_split_size_mb:30,backend:native,max_split_size_mb:40,max_split_size_mb:50");
    assert_eq!(config.max_split_size(), Some(50 * MIB));
    let overridden = AcceptedWhy::Overridden;
    let native = ("backend", "native", AcceptedWhy::AlreadySo);
    let expected = [("max_split_size_mb", "30", overridden), native, ("max_split_size_mb", "40", overridden)];
    assert_eq!(accepted(&config), expected);

    let config = parse("large_segment_size_mb:64,max_split_size_mb:20,large_segment_size_mb:11");
    assert_eq!(config.large_segment_size(), 11 * MIB);
    assert_eq!(accepted(&config), [("large_segment_size_mb", "64", overridden)]);

    assert_eq!(
        refuse("max_split_size_mb:1,max_split_size_mb:40"),
        bad("max_split_size_mb", "1", at(18, 1), Allowed::Mebibytes { least: 20 })
    );
}

#[test]
fn a_later_list_of_divisions_counts_whole() {
    let config = parse("roundup_power2_divisions:4,roundup_power2_divisions:[2:1]");
    assert_eq!(config.rounding().entries()[..4], [1, 1, 0, 0]);
    assert_eq!(accepted(&config), [("roundup_power2_divisions", "4", AcceptedWhy::Overridden)]);
    let config = parse("roundup_power2_divisions:[2:1],roundup_power2_divisions:4");
    assert_eq!(*config.rounding().entries(), [4; 16]);
    assert_eq!(accepted(&config), [("roundup_power2_divisions", "[2:1]", AcceptedWhy::Overridden)]);
}

#[test]
fn unknown_options_name_themselves_and_the_known_ones() {
    for (text, name, place) in [
        ("max_split_size:40", "max_split_size", at(0, 1)),
        ("max_split_size_mb:40, MAX_SPLIT_SIZE_MB:40", "MAX_SPLIT_SIZE_MB", at(22, 2)),
        ("roundup_power2_divisions:[1:2,4:8],x:1", "x", at(35, 2)),
        ("expandable_segments_handle_type:fabric", "expandable_segments_handle_type", at(0, 1)),
        ("größe:1", "größe", at(0, 1)),
        // A name is known before any value is looked at.
        ("max_split_size_mb:1,x:1", "x", at(20, 2)),
    ] {
        let error = refuse(text);
        let policy = Policy::Torch215;
        assert_eq!(error, ConfigError::UnknownOption { name: name.into(), place, policy, newer: false });
        let message = error.to_string();
        assert!(message.contains(&format!("`{name}` at byte {} (item {})", place.offset, place.item)), "{message}");
        assert!(options::names(policy).all(|known| message.contains(known)), "{message}");
    }
}

#[test]
fn each_version_has_its_own_options() {
    for text in [
        "throw_on_cudamalloc_oom:True",
        "expandable_segments_reserve:0.5",
        "expandable_segments_reserve_by_class:[a:0.5]",
        "pinned_free_catch_all:True",
        "pinned_max_round_threshold_mb:1",
        "pinned_max_cached_size_mb:1",
    ] {
        assert!(Config::parse_pytorch(text, Policy::Segments).is_ok());
        assert!(Config::parse_pytorch(text, Policy::Torch215).is_ok());
        let error = Config::parse_pytorch(text, Policy::Torch211).unwrap_err();
        assert!(matches!(error, ConfigError::UnknownOption { newer: true, .. }), "{error}");
        assert!(error.to_string().contains("(torch-2.15 has it)"), "{error}");
    }
    let common = "graph_capture_record_stream_reuse:True,per_process_memory_fraction:0.5,large_segment_size_mb:30";
    assert!(Config::parse_pytorch(common, Policy::Torch211).unwrap().capture_reuse());
}

#[test]
fn what_cannot_be_read() {
    use Expected::{Colon, CommaOrBracket, CommaOrEnd, Name, PairOrBracket, PairValue, Value};
    for (text, offset, item, expected, found) in [
        (",", 0, 1, Name, Some(",")),
        (":", 0, 1, Name, Some(":")),
        ("[", 0, 1, Name, Some("[")),
        ("]", 0, 1, Name, Some("]")),
        ("backend", 7, 1, Colon, None),
        ("backend,", 7, 1, Colon, Some(",")),
        ("backend[native]", 7, 1, Colon, Some("[")),
        ("backend:", 8, 1, Value, None),
        ("backend:,", 8, 1, Value, Some(",")),
        ("backend::native", 8, 1, Value, Some(":")),
        ("backend:]", 8, 1, Value, Some("]")),
        ("backend:native:native", 14, 1, CommaOrEnd, Some(":")),
        ("backend:native]", 14, 1, CommaOrEnd, Some("]")),
        ("backend:native[1:2]", 14, 1, CommaOrEnd, Some("[")),
        ("backend:native,,", 15, 2, Name, Some(",")),
        ("backend:native,backend", 22, 2, Colon, None),
        ("a:[", 3, 1, PairOrBracket, None),
        ("a:[[1:2]]", 3, 1, PairOrBracket, Some("[")),
        ("a:[,]", 3, 1, PairOrBracket, Some(",")),
        ("a:[1", 4, 1, Colon, None),
        ("a:[1]", 4, 1, Colon, Some("]")),
        ("a:[1:", 5, 1, PairValue, None),
        ("a:[1:]", 5, 1, PairValue, Some("]")),
        ("a:[1:[", 5, 1, PairValue, Some("[")),
        ("a:[1:2", 6, 1, CommaOrBracket, None),
        ("a:[1:2:3]", 6, 1, CommaOrBracket, Some(":")),
        ("a:[1:2,", 7, 1, PairOrBracket, None),
        ("a:[1:2]]", 7, 1, CommaOrEnd, Some("]")),
        ("a:[1:2,b:3,c:4", 14, 1, CommaOrBracket, None),
    ] {
        let error = ConfigError::Syntax { place: at(offset, item), expected, found: found.map(Into::into) };
        assert_eq!(refuse(text), error, "{text}");
    }
    let text = refuse("backend:native backend:native").to_string();
    assert_eq!(text, "the options cannot be read at byte 22 (item 1): expected `,` or the end, found `:`");
}

#[test]
fn long_and_strange_texts() {
    let long = "x".repeat(1 << 20);
    for text in
        [long.clone(), format!("{long}:1"), format!("max_split_size_mb:{long}"), format!("backend:[{long}:{long}]")]
    {
        assert!(refuse(&text).to_string().len() < 2000);
    }
    let many = "max_split_size_mb:40,backend:native,".repeat(20_000);
    let config = parse(&many);
    assert_eq!(config.max_split_size(), Some(40 * MIB));
    assert_eq!(config.accepted().len(), 39_999);

    let commas = ",".repeat(1 << 20);
    assert!(matches!(refuse(&commas), ConfigError::Syntax { .. }));
    let brackets = format!("a:{}", "[".repeat(1 << 20));
    assert!(matches!(refuse(&brackets), ConfigError::Syntax { .. }));
    refuse("\0");
    refuse("\u{feff}backend:native");
    refuse("backend：native");
    refuse("max_split_size_mb:٤٠");
    refuse("max_split_size_mb:\u{a0}40");
}

/// Every text of up to five of these pieces is read or refused, and what is read is valid.
#[test]
fn no_text_panics() {
    let pieces = ["a", "max_split_size_mb", "roundup_power2_divisions", "40", ">", ":", ",", "[", "]", "é "];
    for mut n in 0..10usize.pow(5) {
        let mut text = String::new();
        while n > 0 {
            text.push_str(pieces[n % 10]);
            n /= 10;
        }
        if let Ok(config) = Config::parse_pytorch(&text, Policy::Segments) {
            config.validate().unwrap();
            assert_eq!(config.virtual_memory(), VirtualMemory::WherePossible);
        }
    }
}
