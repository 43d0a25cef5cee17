//! The table of rules as programs for the kernel.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

use crate::rules::{Argument, RULES, ThreadKind};

/// What a call returns that no rule allows. An error and not the end of the process: who has taken over a thread gains
/// nothing by either, and a call that a rule should have allowed must not cost every tenant its disk.
const REFUSED: SeccompAction = SeccompAction::Errno(libc::EPERM as u32);

/// The program for threads of `kind`: what these do, and what the threads do that they start, who inherit it.
///
/// The kernel knows beforehand which calls a program allows whatever their arguments are, and does not run it for those
/// (since Linux 5.11): no call that a request needs has a condition.
pub(crate) fn compile(kind: ThreadKind) -> Result<BpfProgram, BackendError> {
    let mut chains: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut unconditional = Vec::new();
    for rule in RULES.iter().filter(|rule| rule.is_for(kind)) {
        let chain = chains.entry(rule.number).or_default();
        match rule.when {
            [] => unconditional.push(rule.number),
            when => chain.push(SeccompRule::new(when.iter().map(condition).collect::<Result<_, _>>()?)?),
        }
    }
    // To the compiler no condition at all is one that always holds.
    unconditional.iter().for_each(|number| drop(chains.insert(*number, Vec::new())));
    let filter = SeccompFilter::new(chains, REFUSED, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?;
    let mut program = clone3_does_not_exist().to_vec();
    program.extend(BpfProgram::try_from(filter)?);
    Ok(program)
}

fn condition(argument: &Argument) -> Result<SeccompCondition, BackendError> {
    let Argument { index, mask, value } = *argument;
    SeccompCondition::new(index, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value.get(std::process::id()))
}

/// Three instructions before the others: the arguments of `clone3` are where no filter can see them, and C libraries go
/// on with `clone` where the kernel does not know it.
fn clone3_does_not_exist() -> [sock_filter; 3] {
    let statement = |code: u32, k: u32, jump_if_not: u8| sock_filter { code: code as u16, jt: 0, jf: jump_if_not, k };
    [
        // The number of the call is at the beginning of what a filter is shown.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_clone3 as u32, 1),
        statement(libc::BPF_RET | libc::BPF_K, SeccompAction::Errno(libc::ENOSYS as u32).into(), 0),
    ]
}
