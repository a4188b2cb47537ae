//! TLS of the streaming server, and of this program as its client.
//!
//! The server has one certificate, which a reload reads again. The client takes that very certificate and no other,
//! whoever signed it and whatever its names are: it reads the same configuration.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Bytes of a PEM file.
const LIMIT: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("reading {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {problem}", path.display())]
    Pem { path: PathBuf, problem: String },
    /// The files are what they should be, but not of each other.
    #[error("{} and {}: {source}", cert.display(), key.display())]
    Pair {
        cert: PathBuf,
        key: PathBuf,
        source: rustls::Error,
    },
    #[error("setting up TLS: {0}")]
    Setup(#[from] rustls::Error),
}

type Result<T> = std::result::Result<T, Error>;

/// The server's certificate (with its chain) and key.
pub struct Identity {
    cert: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<CertifiedKey>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.cert.display())
    }
}

impl Identity {
    /// Reads both files, in PEM.
    ///
    /// # Errors
    /// If one cannot be read, is no PEM of its kind, or the key is another certificate's.
    pub fn read(cert: &Path, key: &Path) -> Result<Identity> {
        let current = RwLock::new(Arc::new(pair(cert, key)?));
        Ok(Identity {
            cert: cert.to_owned(),
            key: key.to_owned(),
            current,
        })
    }

    /// Reads them again: connections from now on are given what they hold.
    pub fn renew(&self) -> Result<()> {
        let new = Arc::new(pair(&self.cert, &self.key)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

fn pair(cert: &Path, key: &Path) -> Result<CertifiedKey> {
    let chain = certificates(cert)?;
    let private = PrivateKeyDer::from_pem_slice(&bytes(key)?).map_err(|e| Error::Pem {
        path: key.to_owned(),
        problem: format!("no private key: {e}"),
    })?;
    CertifiedKey::from_der(chain, private, &ring::default_provider()).map_err(|source| Error::Pair {
        cert: cert.to_owned(),
        key: key.to_owned(),
        source,
    })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let parsed: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes(path)?).collect();
    let problem = match parsed {
        Ok(all) if !all.is_empty() => return Ok(all),
        Ok(_) => "no certificate in it".to_owned(),
        Err(e) => e.to_string(),
    };
    Err(Error::Pem {
        path: path.to_owned(),
        problem,
    })
}

fn bytes(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LIMIT).read_to_end(&mut bytes));
    read.map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(bytes)
}

/// What accepts connections as the server.
pub fn acceptor(identity: Arc<Identity>) -> Result<TlsAcceptor> {
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(identity);
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// What opens connections to the server that has the first certificate of the file `cert`.
pub fn connector(cert: &Path) -> Result<TlsConnector> {
    let known = certificates(cert)?.swap_remove(0);
    let provider = Arc::new(ring::default_provider());
    let only = Only {
        known,
        provider: provider.clone(),
    };
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(only))
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Takes one certificate, whose holder proves by a signature that it has the key.
#[derive(Debug)]
struct Only {
    known: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Only {
    fn verify_server_cert(
        &self,
        cert: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        match *cert == self.known {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(rustls::Error::General(
                "the server's certificate is not that of streaming.tls.cert; was it renewed without a reload?"
                    .to_owned(),
            )),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
