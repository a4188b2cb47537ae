//! From rules to a classic BPF program (seccomp(2)): for each architecture a binary tree over the call's number.
//!
//! ```text
//! LD arch ── native? ── LD nr ── JGE m ──┬── JGE … ── RET            numbers with one answer: a constant
//!        └── other?  ── LD nr ── …       └── JGE … ── LD arg … RET   with argument rules: tried in order
//!        └── RET KILL_PROCESS
//! ```
//!
//! The tree keeps denied and argument-dependent calls quick (ten instructions, not hundreds), and stays within what the
//! kernel can evaluate beforehand: calls that are allowed whatever their arguments never run the program.

use std::collections::BTreeMap;

use super::names::{Arch, X32_BIT};
use super::profile::{Cond, Op, Profile};
use super::{Result, SeccompError};

/// What the kernel takes (`BPF_MAXINSNS`).
pub const MAX_INSTRUCTIONS: usize = 4096;

pub const KILL_PROCESS: u32 = 0x8000_0000;
pub const KILL_THREAD: u32 = 0;
pub const TRAP: u32 = 0x0003_0000;
pub const ERRNO: u32 = 0x0005_0000;
pub const TRACE: u32 = 0x7ff0_0000;
pub const LOG: u32 = 0x7ffc_0000;
pub const ALLOW: u32 = 0x7fff_0000;

/// `struct sock_filter` (linux/filter.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insn {
    pub code: u16,
    pub jt: u8,
    pub jf: u8,
    pub k: u32,
}

/// BPF_LD | BPF_W | BPF_ABS: a word of `struct seccomp_data`.
pub const LD: u16 = 0x20;
/// BPF_JMP with BPF_JA, or with BPF_K and the comparison of the accumulator.
pub const JA: u16 = 0x05;
pub const JEQ: u16 = 0x15;
pub const JGT: u16 = 0x25;
pub const JGE: u16 = 0x35;
/// BPF_ALU | BPF_AND | BPF_K
pub const AND: u16 = 0x54;
/// BPF_RET | BPF_K
pub const RET: u16 = 0x06;

const NR: u32 = 0;
const ARCH: u32 = 4;
/// Offset of the low half of an argument (the node is little-endian); the high half follows.
const ARGS: u32 = 16;

/// Comparisons, and the action if all hold.
type Conditional = (Vec<Cond>, u32);
/// What a profile says of one call: the conditional rules, then the one without a condition.
type Answers = (Vec<Conditional>, Option<u32>);

/// The answer to one number.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Leaf {
    Action(u32),
    /// The first whose comparisons all hold, else the last field.
    Rules(Vec<Conditional>, u32),
}

/// The program of a profile.
///
/// # Errors
/// If it is longer than the kernel takes.
pub fn assemble(profile: &Profile) -> Result<Vec<Insn>> {
    let mut program = vec![insn(LD, ARCH, 0, 0)];
    let mut done = Vec::new();
    for arch in &profile.archs {
        if done.contains(&arch.audit()) {
            continue;
        }
        done.push(arch.audit());
        let mut part = vec![insn(LD, NR, 0, 0)];
        part.append(&mut tree(&segments(profile, arch.audit())));
        program.push(insn(JEQ, arch.audit(), 1, 0));
        program.push(insn(JA, part.len() as u32, 0, 0));
        program.append(&mut part);
    }
    program.push(insn(RET, KILL_PROCESS, 0, 0));
    if program.len() > MAX_INSTRUCTIONS {
        return Err(SeccompError::TooLarge {
            instructions: program.len(),
        });
    }
    Ok(program)
}

/// The program as the kernel reads it, eight bytes an instruction.
pub fn bytes(program: &[Insn]) -> Vec<u8> {
    let one = |i: &Insn| {
        let (code, k) = (i.code.to_ne_bytes(), i.k.to_ne_bytes());
        [code[0], code[1], i.jt, i.jf, k[0], k[1], k[2], k[3]]
    };
    program.iter().flat_map(one).collect()
}

fn insn(code: u16, k: u32, jt: u8, jf: u8) -> Insn {
    Insn { code, jt, jf, k }
}

/// First number and answer of each stretch of equal answers; the first starts at 0.
fn segments(profile: &Profile, audit: u32) -> Vec<(u32, Leaf)> {
    let mut all = Vec::new();
    for arch in profile.archs.iter().filter(|arch| arch.audit() == audit) {
        let base = if *arch == Arch::X32 { X32_BIT } else { 0 };
        part(profile, *arch, base, &mut all);
    }
    // Numbers with the x32 bit are another architecture's, if the profile does not speak it.
    if audit == Arch::X32.audit() && !profile.archs.contains(&Arch::X32) {
        all.push((X32_BIT, Leaf::Action(KILL_PROCESS)));
    }
    all.sort_by_key(|(start, _)| *start);
    all.dedup_by(|next, first| next.1 == first.1);
    all
}

fn part(profile: &Profile, arch: Arch, base: u32, all: &mut Vec<(u32, Leaf)>) {
    let calls = calls(profile, arch);
    let mut next = base;
    for (number, leaf) in &calls {
        if *number > next {
            all.push((next, Leaf::Action(profile.default)));
        }
        all.push((*number, leaf.clone()));
        next = number + 1;
    }
    // Calls younger than the profile: a program shall fall back, not fail (as libc does for ENOSYS alone).
    let younger = match profile.default {
        ALLOW | LOG => profile.default,
        action if action & 0xffff_0000 == TRACE => action,
        _ => ERRNO | libc::ENOSYS as u32,
    };
    all.push((next, Leaf::Action(younger)));
}

/// The answer to each call that the profile names. Rules with arguments come first, in the profile's order.
fn calls(profile: &Profile, arch: Arch) -> BTreeMap<u32, Leaf> {
    let mut calls: BTreeMap<u32, Answers> = BTreeMap::new();
    for rule in &profile.rules {
        for number in rule.names.iter().filter_map(|name| arch.number(name)) {
            let (conditional, otherwise) = calls.entry(number).or_default();
            match rule.conds.is_empty() {
                true => _ = otherwise.get_or_insert(rule.action),
                false => conditional.push((rule.conds.clone(), rule.action)),
            }
        }
    }
    let leaf = |(mut rules, otherwise): Answers| {
        let otherwise = otherwise.unwrap_or(profile.default);
        while rules.last().is_some_and(|(_, action)| *action == otherwise) {
            rules.pop();
        }
        if rules.is_empty() {
            Leaf::Action(otherwise)
        } else {
            Leaf::Rules(rules, otherwise)
        }
    };
    calls.into_iter().map(|(number, rules)| (number, leaf(rules))).collect()
}

/// The accumulator holds the number.
fn tree(segments: &[(u32, Leaf)]) -> Vec<Insn> {
    if let [(_, only)] = segments {
        return leaf(only);
    }
    let middle = segments.len() / 2;
    let (mut low, mut high) = (tree(&segments[..middle]), tree(&segments[middle..]));
    let mut program = match u8::try_from(low.len()) {
        Ok(skip) => vec![insn(JGE, segments[middle].0, skip, 0)],
        Err(_) => vec![insn(JGE, segments[middle].0, 0, 1), insn(JA, low.len() as u32, 0, 0)],
    };
    program.append(&mut low);
    program.append(&mut high);
    program
}

fn leaf(leaf: &Leaf) -> Vec<Insn> {
    let (rules, otherwise) = match leaf {
        Leaf::Action(action) => return vec![insn(RET, *action, 0, 0)],
        Leaf::Rules(rules, otherwise) => (rules, otherwise),
    };
    let mut program = Vec::new();
    for (conds, action) in rules {
        let mut part = vec![insn(RET, *action, 0, 0)];
        for cond in conds.iter().rev() {
            // At most six conditions of seven instructions: far from the 255 of a jump.
            let mut compared = compare(cond, part.len() as u8);
            compared.append(&mut part);
            part = compared;
        }
        program.append(&mut part);
    }
    program.push(insn(RET, *otherwise, 0, 0));
    program
}

/// One comparison of 64 bits by halves: falls through if it holds, else jumps `fail` instructions past its end.
fn compare(cond: &Cond, fail: u8) -> Vec<Insn> {
    let (high, low) = ((cond.value >> 32) as u32, cond.value as u32);
    let ld_low = insn(LD, ARGS + 8 * u32::from(cond.arg), 0, 0);
    let ld_high = insn(LD, ARGS + 4 + 8 * u32::from(cond.arg), 0, 0);
    match cond.op {
        Op::Eq => vec![ld_high, insn(JEQ, high, 0, fail + 2), ld_low, insn(JEQ, low, 0, fail)],
        Op::Ne => vec![ld_high, insn(JEQ, high, 0, 2), ld_low, insn(JEQ, low, fail, 0)],
        Op::Masked(mask) => {
            let (mask_high, mask_low) = ((mask >> 32) as u32, mask as u32);
            let mut program = Vec::new();
            // A mask of 32 bits asks nothing of the high half.
            if mask_high != 0 || high != 0 {
                program.extend([ld_high, insn(AND, mask_high, 0, 0), insn(JEQ, high, 0, fail + 3)]);
            }
            program.extend([ld_low, insn(AND, mask_low, 0, 0), insn(JEQ, low, 0, fail)]);
            program
        }
        Op::Gt | Op::Ge => {
            let code = if cond.op == Op::Gt { JGT } else { JGE };
            vec![
                ld_high,
                insn(JGT, high, 3, 0),
                insn(JEQ, high, 0, fail + 2),
                ld_low,
                insn(code, low, 0, fail),
            ]
        }
        Op::Lt | Op::Le => {
            let code = if cond.op == Op::Lt { JGE } else { JGT };
            vec![
                ld_high,
                insn(JGT, high, fail + 3, 0),
                insn(JEQ, high, 0, 2),
                ld_low,
                insn(code, low, fail, 0),
            ]
        }
    }
}
