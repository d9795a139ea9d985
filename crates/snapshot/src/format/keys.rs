//! The keys of a snapshot's dictionaries, as small numbers.

macro_rules! keys {
    ($($name:ident = $text:literal),* $(,)?) => {
        /// A key that is known, or [`Key::OTHER`].
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) struct Key(pub(crate) u8);

        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum Number { $($name),*, COUNT }

        impl Key {
            $(pub(crate) const $name: Self = Self(Number::$name as u8);)*
            /// How many are known.
            pub(crate) const COUNT: usize = Number::COUNT as usize;
            /// Any other.
            pub(crate) const OTHER: Self = Self(u8::MAX);

            /// The key itself.
            pub(crate) const fn name(self) -> &'static str {
                const NAMES: [&str; Key::COUNT] = [$($text),*];
                if (self.0 as usize) < Self::COUNT { NAMES[self.0 as usize] } else { "?" }
            }
        }

        /// The number of a key.
        pub(crate) fn key_of(text: &str) -> Key {
            match text {
                $($text => Key::$name,)*
                _ => Key::OTHER,
            }
        }
    };
}

keys! {
    SEGMENTS = "segments",
    DEVICE_TRACES = "device_traces",
    ALLOCATOR_SETTINGS = "allocator_settings",
    EXTERNAL_ANNOTATIONS = "external_annotations",
    GPUPOOL = "gpupool",
    DEVICE = "device",
    ADDRESS = "address",
    TOTAL_SIZE = "total_size",
    ALLOCATED_SIZE = "allocated_size",
    ACTIVE_SIZE = "active_size",
    STREAM = "stream",
    ANY_STREAM = "any_stream",
    SEGMENT_TYPE = "segment_type",
    SEGMENT_POOL_ID = "segment_pool_id",
    IS_EXPANDABLE = "is_expandable",
    FRAMES = "frames",
    BLOCKS = "blocks",
    SIZE = "size",
    REQUESTED_SIZE = "requested_size",
    STATE = "state",
    LABEL = "label",
    GENERATION = "generation",
    GRAPH = "graph",
    NAME = "name",
    FILENAME = "filename",
    LINE = "line",
    ACTION = "action",
    ADDR = "addr",
    DEVICE_FREE = "device_free",
    TIME_US = "time_us",
    COMPILE_CONTEXT = "compile_context",
    USER_METADATA = "user_metadata",
    POOL_ID = "pool_id",
    THREAD = "thread",
    STAGE = "stage",
}
