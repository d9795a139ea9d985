//! Faults on demand: calls that fail because a test said so.

use gpupool_device::Call;

#[derive(Clone, Copy, Debug)]
struct Fault {
    call: Call,
    /// Calls until it strikes; `None` strikes every time.
    remaining: Option<u64>,
    code: u32,
}

/// The faults armed on one device.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    armed: Vec<Fault>,
    /// Calls until the active captures are invalidated.
    invalidate_after: Option<u64>,
}

impl Faults {
    pub(crate) fn fail_nth(&mut self, call: Call, n: u64, code: u32) {
        self.armed.push(Fault { call, remaining: Some(n.max(1)), code });
    }

    pub(crate) fn fail_all(&mut self, call: Call, code: u32) {
        self.armed.push(Fault { call, remaining: None, code });
    }

    pub(crate) fn invalidate_after(&mut self, calls: u64) {
        self.invalidate_after = Some(calls);
    }

    pub(crate) fn clear(&mut self) {
        self.armed.clear();
        self.invalidate_after = None;
    }

    pub(crate) fn any(&self) -> bool {
        !self.armed.is_empty() || self.invalidate_after.is_some()
    }

    /// Counts one call against every fault armed for its kind. The code with which it must fail, if any.
    pub(crate) fn strike(&mut self, call: Call) -> Option<u32> {
        let mut code = None;
        self.armed.retain_mut(|fault| {
            if fault.call != call {
                return true;
            }
            match &mut fault.remaining {
                None => {
                    code = code.or(Some(fault.code));
                    true
                }
                Some(n) if *n > 1 => {
                    *n -= 1;
                    true
                }
                Some(_) => {
                    code = code.or(Some(fault.code));
                    false
                }
            }
        });
        code
    }

    /// Counts one call of any kind. Whether captures are to be invalidated now; stays due until [`Self::invalidated`].
    pub(crate) fn invalidation_due(&mut self) -> bool {
        match &mut self.invalidate_after {
            None => false,
            Some(0) => true,
            Some(n) => {
                *n -= 1;
                false
            }
        }
    }

    pub(crate) fn invalidated(&mut self) {
        self.invalidate_after = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_of_the_kind_fails_once_and_every_call_when_asked() {
        let mut f = Faults::default();
        f.fail_nth(Call::MemAlloc, 2, 7);
        assert_eq!(
            [Call::MemAlloc, Call::MemFree, Call::MemAlloc, Call::MemAlloc].map(|c| f.strike(c)),
            [None, None, Some(7), None]
        );
        f.fail_all(Call::MemMap, 2);
        assert_eq!([f.strike(Call::MemMap), f.strike(Call::MemMap)], [Some(2), Some(2)]);
        f.clear();
        assert!(!f.any());
    }
}
