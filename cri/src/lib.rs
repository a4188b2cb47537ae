//! CRI.

pub mod records {
    //! Records service, generated.
    #[allow(clippy::all, missing_docs)]
    pub mod v1 {
        tonic::include_proto!("reconcile.records.v1");
    }
}
pub mod runtime {
    //! CRI.
    #[allow(clippy::all, missing_docs)]
    pub mod v1 {
        tonic::include_proto!("runtime.v1");
    }
}
