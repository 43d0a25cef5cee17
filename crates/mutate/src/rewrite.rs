//! A file with its changes in it, of which a running program makes the one that it is told to.
//!
//! `a + b` becomes `(match crate::__change(&[7, 8]) { 0 => { a + b } 7 => { (a) - (b) } _ => { (a) * (b) } })`. An arm
//! that is deleted has a guard. What is not run stays as it is: constants, functions
//! that one is made by, patterns, types.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use proc_macro2::{LineColumn, Span};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{
    Arm, BinOp, Block, Expr, ExprBinary, ExprMatch, ExprRepeat, ExprStruct, ExprUnary, Pat, PatGuard, Signature,
};

use crate::change::{Change, Genre, offset};

/// A change's number, from 1.
pub(crate) type Id = u32;

pub(crate) struct Rewritten {
    pub(crate) text: String,
    pub(crate) marks: Marks,
}

/// What is left out where some of the text does not compile.
pub(crate) type Marks = Vec<(Range<usize>, Left)>;

#[derive(Clone)]
pub(crate) enum Left {
    /// A change, which does not compile.
    Change(Id),
    /// All changes of a place, which do not compile beside what is there.
    Place(Vec<Id>),
}

/// Functions of these names stay `const`, and as they are.
///
/// # Errors
/// Where it is no Rust.
pub(crate) fn rewrite<'a>(
    source: &'a str,
    changes: impl Iterator<Item = (Id, &'a Change)>,
    constant: &'a BTreeSet<String>,
) -> syn::Result<Rewritten> {
    let mut places = Places { source, changes: HashMap::new(), constant, edits: Vec::new() };
    for (id, change) in changes {
        places.changes.entry((change.genre, change.span.start.into())).or_default().push((id, change));
    }
    places.visit_file(&syn::parse_file(source)?);
    Ok(places.apply())
}

/// The function that a changed program asks; what it is told is in the environment. It may neither allocate nor make system
/// calls but the first time, and to tell what is reached.
pub(crate) fn helper(ids: usize) -> String {
    include_str!("helper.rs").replace("IDS", &(ids + 1).to_string())
}

/// What is put in somewhere, where something begins or ends.
struct Edit {
    at: usize,
    is_end: bool,
    text: String,
    /// The changes of the place that ends.
    ids: Vec<Id>,
    /// What of the text is there for each of them.
    changed: Vec<Range<usize>>,
}

struct Places<'a> {
    source: &'a str,
    changes: HashMap<(Genre, LineColumn), Vec<(Id, &'a Change)>>,
    constant: &'a BTreeSet<String>,
    edits: Vec<Edit>,
}

impl<'a> Places<'a> {
    fn offset(&self, at: LineColumn) -> usize {
        offset(self.source, at)
    }

    fn range(&self, span: Span) -> Range<usize> {
        self.offset(span.start())..self.offset(span.end())
    }

    fn text(&self, node: &Expr) -> &'a str {
        &self.source[self.range(node.span())]
    }

    /// The changes at a place.
    fn take(&mut self, genre: Genre, span: Span) -> Vec<(Id, &'a Change)> {
        self.changes.remove(&(genre, span.start())).unwrap_or_default()
    }

    /// Has what stands in `whole` chosen from itself and what `changed` makes of each change; `inside` looks for more in it.
    fn choose(
        &mut self,
        changes: &[(Id, &Change)],
        whole: Range<usize>,
        changed: impl Fn(&Self, &Change) -> String,
        inside: impl FnOnce(&mut Self),
    ) {
        let Some(((last, _), _)) = changes.split_last() else { return inside(self) };
        let ids: Vec<Id> = changes.iter().map(|(id, _)| *id).collect();
        let begin = format!("(match crate::__change(&{ids:?}) {{ 0 => {{ ");
        let mut end = " }".to_owned();
        let mut ranges = Vec::new();
        for (id, change) in changes {
            let pattern = if id == last { "_".to_owned() } else { id.to_string() };
            let from = end.len();
            end += &format!(" {pattern} => {{ {} }}", changed(self, change));
            ranges.push(from..end.len());
        }
        end += " })";
        self.begin(whole.start, begin);
        inside(self);
        self.end(whole.end, end, ids, ranges);
    }

    fn begin(&mut self, at: usize, text: String) {
        self.edits.push(Edit { at, is_end: false, text, ids: Vec::new(), changed: Vec::new() });
    }

    fn end(&mut self, at: usize, text: String, ids: Vec<Id>, changed: Vec<Range<usize>>) {
        self.edits.push(Edit { at, is_end: true, text, ids, changed });
    }

    fn function(&mut self, signature: &Signature, block: &Block) {
        let (Some(first), Some(last)) = (block.stmts.first(), block.stmts.last()) else { return };
        if let Some(token) = signature.constness {
            if self.constant.contains(&signature.ident.to_string()) {
                return;
            }
            let token = self.range(token.span);
            self.begin(token.start, "/* ".to_owned());
            self.end(token.end, " */".to_owned(), Vec::new(), Vec::new());
        }
        let changes = self.take(Genre::FnValue, first.span());
        let whole = self.offset(first.span().start())..self.offset(last.span().end());
        self.choose(&changes, whole, |_, change| change.replacement.clone(), |it| it.visit_block(block));
    }

    /// All edits, in their order: of two at one place the one that ends something is first.
    fn apply(mut self) -> Rewritten {
        self.edits.sort_by_key(|edit| (edit.at, !edit.is_end));
        let (mut text, mut marks, mut from) = (String::new(), Vec::new(), 0);
        let mut begun = Vec::new();
        for edit in self.edits {
            text += &self.source[from..edit.at];
            from = edit.at;
            let base = text.len();
            text += &edit.text;
            if edit.is_end {
                let each = edit.ids.iter().zip(edit.changed);
                marks.extend(each.map(|(id, range)| (base + range.start..base + range.end, Left::Change(*id))));
                let whole = begun.pop().expect("it has begun")..text.len();
                marks.extend((!edit.ids.is_empty()).then_some((whole, Left::Place(edit.ids))));
            } else {
                begun.push(base);
            }
        }
        text += &self.source[from..];
        Rewritten { text, marks }
    }
}

/// Whether it binds names, which only `if` and `while` around it can.
fn binds(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(ExprBinary { left, op: BinOp::And(_), right, .. }) => binds(left) || binds(right),
        _ => false,
    }
}

impl<'ast> Visit<'ast> for Places<'_> {
    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.function(&node.sig, &node.block);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.function(&node.sig, &node.block);
    }

    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        if let Some(block) = &node.default {
            self.function(&node.sig, block);
        }
    }

    fn visit_expr_binary(&mut self, node: &'ast ExprBinary) {
        if binds(&node.left) || binds(&node.right) {
            return visit::visit_expr_binary(self, node);
        }
        let changes = self.take(Genre::BinaryOperator, node.op.span());
        let changed = |it: &Self, change: &Change| {
            format!("({}) {} ({})", it.text(&node.left), change.replacement, it.text(&node.right))
        };
        self.choose(&changes, self.range(node.span()), changed, |it| visit::visit_expr_binary(it, node));
    }

    fn visit_expr_unary(&mut self, node: &'ast ExprUnary) {
        let changes = self.take(Genre::UnaryOperator, node.op.span());
        let changed = |it: &Self, _: &Change| it.text(&node.expr).to_owned();
        self.choose(&changes, self.range(node.span()), changed, |it| visit::visit_expr_unary(it, node));
    }

    fn visit_expr_struct(&mut self, node: &'ast ExprStruct) {
        let fields = node.fields.iter();
        let changes: Vec<_> = fields.flat_map(|field| self.take(Genre::StructField, field.span())).collect();
        let whole = self.range(node.span());
        let changed = |it: &Self, change: &Change| {
            let (start, end) = (it.offset(change.span.start.into()), it.offset(change.span.end.into()));
            format!("{}{}", &it.source[whole.start..start], &it.source[end..whole.end])
        };
        self.choose(&changes, whole.clone(), changed, |it| visit::visit_expr_struct(it, node));
    }

    fn visit_expr_match(&mut self, node: &'ast ExprMatch) {
        // Where an arm is missing it is the whole that does not compile.
        let arms = node.arms.iter().filter_map(|arm| self.changes.get(&(Genre::MatchArm, arm.span().start())));
        let ids: Vec<Id> = arms.flatten().map(|(id, _)| *id).collect();
        let whole = self.range(node.span());
        self.begin(whole.start, String::new());
        visit::visit_expr_match(self, node);
        self.end(whole.end, String::new(), ids, Vec::new());
    }

    fn visit_arm(&mut self, node: &'ast Arm) {
        let changes = self.take(Genre::MatchArm, node.span());
        let ids: Vec<Id> = changes.iter().map(|(id, _)| *id).collect();
        let is_there = format!("crate::__change(&{ids:?}) == 0");
        if let Pat::Guard(PatGuard { guard, .. }) = &node.pat {
            let whole = self.range(guard.span());
            let [open, close] = if binds(guard) || ids.is_empty() { [""; 2] } else { ["(", ")"] };
            if !ids.is_empty() {
                self.begin(whole.start, format!("{is_there} && "));
            }
            self.begin(whole.start, open.to_owned());
            let changes = if binds(guard) { Vec::new() } else { self.take(Genre::MatchArmGuard, guard.span()) };
            let changed = |_: &Self, change: &Change| change.replacement.clone();
            self.choose(&changes, whole.clone(), changed, |it| it.visit_expr(guard));
            self.end(whole.end, close.to_owned(), Vec::new(), Vec::new());
        } else if !ids.is_empty() {
            self.begin(self.offset(node.pat.span().end()), format!(" if {is_there}"));
        }
        self.visit_expr(&node.body);
        if !ids.is_empty() {
            self.end(self.offset(node.body.span().end()), String::new(), ids, Vec::new());
        }
    }

    fn visit_expr_repeat(&mut self, node: &'ast ExprRepeat) {
        self.visit_expr(&node.expr);
    }

    // What the compiler computes, and what is no expression.
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_variant(&mut self, _: &'ast syn::Variant) {}
    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_pat(&mut self, _: &'ast Pat) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}
