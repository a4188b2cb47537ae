//! Our certificates: of several, the one that the server's authorities have issued is shown (RFC 8446, 4.2.4).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::CertifiedKey;

use super::transport::{Failure, certificates, pem};

#[derive(Debug)]
pub struct Identities {
    keys: Vec<Arc<CertifiedKey>>,
    in_vain: Arc<AtomicBool>,
}

impl Identities {
    /// From PEM files of certificate and key; without the second both are in the first.
    /// `in_vain` is set when a server asks for a certificate and there is none to show.
    pub fn read(
        pairs: &[(PathBuf, Option<PathBuf>)],
        provider: &CryptoProvider,
        in_vain: Arc<AtomicBool>,
    ) -> Result<Identities, Failure> {
        let one = |(cert, file): &(PathBuf, Option<PathBuf>)| {
            let chain = certificates(cert)?;
            let file = file.as_ref().unwrap_or(cert);
            let wrong = |e: &dyn std::fmt::Display| {
                Failure::Setup(format!(
                    "client certificate {}, key {}: {e}",
                    cert.display(),
                    file.display()
                ))
            };
            let der = PrivateKeyDer::from_pem_slice(&pem(file)?).map_err(|e| wrong(&e))?;
            let key = provider.key_provider.load_private_key(der).map_err(|e| wrong(&e))?;
            let certified = CertifiedKey::new(chain, key);
            match certified.keys_match() {
                // Some kinds of key cannot be compared.
                Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {}
                Err(e) => return Err(wrong(&e)),
            }
            Ok(Arc::new(certified))
        };
        let keys = pairs.iter().map(one).collect::<Result<_, _>>()?;
        Ok(Identities { keys, in_vain })
    }
}

impl ResolvesClientCert for Identities {
    fn resolve(&self, authorities: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let usable = || self.keys.iter().filter(|one| one.key.choose_scheme(schemes).is_some());
        let issued = |one: &&Arc<CertifiedKey>| {
            let mut issuers = one.cert.iter().filter_map(|certificate| issuer(certificate));
            issuers.any(|issuer| authorities.contains(&issuer))
        };
        let found = usable().find(issued).or_else(|| usable().next()).cloned();
        if found.is_none() {
            self.in_vain.store(true, Ordering::Relaxed);
        }
        found
    }

    fn has_certs(&self) -> bool {
        !self.keys.is_empty()
    }
}

/// The issuer's name in a certificate, as it is encoded (RFC 5280, 4.1).
fn issuer(certificate: &[u8]) -> Option<&[u8]> {
    let (_, certificate, _) = element(certificate)?;
    let (_, fields, _) = element(certificate)?;
    let (tag, _, rest) = element(fields)?;
    // The version may be left out; it is [0].
    let rest = if tag == 0xa0 { element(rest)?.2 } else { rest };
    // Serial number read; then the algorithm.
    let (_, _, rest) = element(rest)?;
    let (_, _, after) = element(rest)?;
    Some(&rest[..rest.len() - after.len()])
}

/// Tag, content and what follows, of the first element (X.690, 8.1, definite lengths).
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (
                bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)),
                rest,
            )
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_issuer_is_found_and_nonsense_has_none() {
        let name = [0x30, 3, 0x0c, 1, b'a'];
        let serial = [2, 1, 7];
        let algorithm = [0x30, 2, 5, 0];
        let wrap = |content: &[u8]| [&[0x30, 0x81, content.len() as u8], content].concat();
        for version in [&[0xa0, 3, 2, 1, 2][..], &[]] {
            let fields = [version, &serial, &algorithm, &name, &[0x30, 0]].concat();
            let certificate = wrap(&wrap(&fields));
            assert_eq!(issuer(&certificate), Some(&name[..]));
            for end in 0..certificate.len() {
                assert_eq!(issuer(&certificate[..end]), None, "{end}");
            }
        }
        assert_eq!(issuer(&[0x30, 0x80, 0, 0]), None);
        assert_eq!(issuer(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]), None);
    }
}
