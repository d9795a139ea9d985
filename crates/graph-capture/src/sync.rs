//! The locks of this crate: a model checker's when built with `--cfg gpupool_shuttle`.

#[cfg(not(gpupool_shuttle))]
pub(crate) use parking_lot::{Mutex, MutexGuard};

#[cfg(gpupool_shuttle)]
pub(crate) use checked::{Mutex, MutexGuard};

#[cfg(gpupool_shuttle)]
mod checked {
    use std::sync::PoisonError;

    pub(crate) use shuttle::sync::MutexGuard;

    /// A mutex of the model checker with the other one's methods.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }
}
